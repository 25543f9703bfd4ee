// --device and -ngl: what a model runs on.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "anchorkv/status.h"
#include "runtime/engine.h"

namespace anchorkv::cli {

struct DeviceOptions {
  std::string device;  // "cpu", "cuda" or empty: what gpu_layers says
  std::string gpu_layers;
};

// Registers the options; `options` must outlive the parsing.
void AddDeviceOptions(CLI::App* app, DeviceOptions* options);

// kInvalidArgument when the two contradict each other or only some of the model's layers are asked for.
Result<Device> ResolveDevice(const DeviceOptions& options, int layers);

}  // namespace anchorkv::cli
