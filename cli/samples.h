// Statistics of repeated timings.
#pragma once

#include <vector>

namespace anchorkv {

// All are 0 for no samples; the deviation is that of a sample (n - 1) and 0 for one.
double Mean(const std::vector<double>& samples);
double StandardDeviation(const std::vector<double>& samples);
double Median(std::vector<double> samples);  // the mean of the two middle ones for an even number
double Smallest(const std::vector<double>& samples);
double Largest(const std::vector<double>& samples);

}  // namespace anchorkv
