#include "cli/device_options.h"

#include "cli/validators.h"

namespace anchorkv::cli {

void AddDeviceOptions(CLI::App* app, DeviceOptions* o) {
  app->add_option("--device", o->device, "cpu (default) | cuda: what the model runs on")
      ->type_name("NAME")
      ->check(OneOf({"cpu", "cuda"}))
      ->group("Running");
  app->add_option("--n-gpu-layers", o->gpu_layers, "all: the same as --device cuda; 0: the CPU (-ngl)")
      ->type_name("N")
      ->check([](const std::string& text) -> std::string {
        const bool number = !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == text.npos;
        return number || text == "all" ? "" : "-ngl is '" + text + "'; allowed are all and whole numbers";
      })
      ->group("Running");
}

Result<Device> ResolveDevice(const DeviceOptions& o, int layers) {
  if (o.gpu_layers.empty()) return o.device == "cuda" ? Device::kCuda : Device::kCpu;
  const int on_gpu = o.gpu_layers == "all" ? layers : std::stoi(o.gpu_layers);
  if (on_gpu > 0 && on_gpu < layers) {
    return InvalidArgument("-ngl " + o.gpu_layers + ": the model has " + std::to_string(layers) +
                           " layers and runs on one device; give all (the GPU) or 0 (the CPU)");
  }
  const Device device = on_gpu > 0 ? Device::kCuda : Device::kCpu;
  if (!o.device.empty() && (o.device == "cuda") != (device == Device::kCuda)) {
    return InvalidArgument("--device " + o.device + " and -ngl " + o.gpu_layers + " contradict each other");
  }
  return device;
}

}  // namespace anchorkv::cli
