// Files that appear whole or not at all: whoever reads the path sees the old file or the new one, also when the
// process is killed or the machine goes down in between.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "anchorkv/status.h"

namespace anchorkv {

// Whether a file can be put at `path`, so that nobody computes for minutes before learning that it cannot. The folder
// must exist and be writable, and what is there now, if anything, must be a regular file. kNotFound, kInvalidArgument.
Status CheckReplaceable(const std::string& path);

// Writes the pieces one after another into a temporary file beside `path` (its name, a dot, six characters and
// ".part"), puts it on disk, gives it the name and puts the name on disk. On an error `path` is as it was and the
// temporary file is gone. A killed process leaves the temporary file to the next call for the same path, which removes
// it. kInvalidArgument and kNotFound as above, kDataLoss when the bytes cannot be written (a full disk).
Status ReplaceFile(const std::string& path, std::span<const std::span<const std::byte>> pieces);

// Calls use(name) for what is in a folder, in any order; 0 or the error number. The iterators of std::filesystem end
// the process when there is no memory for them.
int ForEachName(const std::string& folder, const std::function<void(const std::string& name)>& use);

// Removes the temporary files in `folder` that killed processes left of files whose names `of` accepts, and says how
// many. What a living process is writing stays: it holds a lock on it. Folders that cannot be read have none.
int RemoveLeftovers(const std::string& folder, const std::function<bool(std::string_view)>& of);

}  // namespace anchorkv
