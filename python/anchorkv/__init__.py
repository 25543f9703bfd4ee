"""Reports on evaluations of anchorkv. docs/reports.md."""
