// The baselines by name, and the quantisers as Method objects.
#include "baseline/method.h"

#include <array>
#include <functional>

#include "base/alloc_guard.h"
#include "baseline/each_layer.h"
#include "baseline/evictors.h"
#include "baseline/ggml_blocks.h"
#include "baseline/kivi.h"
#include "baseline/prompt_check.h"
#include "baseline/turboquant.h"

namespace anchorkv {
namespace {

using Segments = std::vector<std::shared_ptr<const Segment>>;
using MakeSegment = Result<std::shared_ptr<const Segment>> (*)(const LayerInput& input, const Backend& backend);

class Quantiser final : public Method {
 public:
  // Head dims must be multiples of `group`.
  Quantiser(int group, MakeSegment make) : group_(group), make_(make) {}

  Observations observations() const override { return {}; }
  bool has_budget() const override { return false; }

  Result<Segments> Compress(std::span<const LayerInput> layers, std::span<const int64_t>,
                            const Backend& backend) const override {
    return GuardAllocation("the codes", [&]() -> Result<Segments> {
      AKV_RETURN_IF_ERROR(CheckPrompt(layers, {}));
      if (layers[0].keys.head_dim % group_ != 0) {
        return Unsupported("head dim " + std::to_string(layers[0].keys.head_dim) +
                           "; this quantiser needs a multiple of " + std::to_string(group_));
      }
      Segments segments(layers.size());
      AKV_RETURN_IF_ERROR(ForEachLayer(layers.size(), [&](size_t l) -> Status {
        AKV_ASSIGN_OR_RETURN(segments[l], make_(layers[l], backend));
        return {};
      }));
      return segments;
    });
  }

 private:
  int group_;
  MakeSegment make_;
};

constexpr int kCodeGroup = 8;  // whole bytes of codes

std::unique_ptr<Method> MakeQuantiser(int group, MakeSegment make) { return std::make_unique<Quantiser>(group, make); }

template <int kBits>
std::unique_ptr<Method> MakeTurbo() {
  return MakeQuantiser(kCodeGroup, [](const LayerInput& input, const Backend& backend) {
    return MakeTurboQuant(input, kBits, backend);
  });
}

struct Entry {
  std::string_view name;
  std::unique_ptr<Method> (*make)();
};

constexpr Entry kMethods[] = {
    {"streamingllm", [] { return MakeEvictor({}, &SelectStreamingLlm); }},
    {"h2o", [] { return MakeEvictor({.attention_mass = true}, &SelectH2o); }},
    {"observed", [] { return MakeEvictor({.attention_mass = true}, &SelectObserved); }},
    {"snapkv", [] { return MakeEvictor({.window = kSnapKvWindow}, &SelectSnapKv); }},
    {"pyramidkv", &MakePyramidKv},
    {"adakv", [] { return MakeEvictor({.window = kSnapKvWindow}, &SelectAdaKv); }},
    {"tova", [] { return MakeEvictor({.window = 1}, &SelectTova); }},
    {"keydiff", [] { return MakeEvictor({}, &SelectKeyDiff); }},
    {"knorm", [] { return MakeEvictor({}, &SelectKeyNorm); }},
    {"expected", [] { return MakeEvictor({.query_moments = true}, &SelectExpected); }},
    {"ada-expected", [] { return MakeEvictor({.query_moments = true}, &SelectAdaExpected); }},
    {"kvzip", &MakeKvZip},
    {"q8_0", [] { return MakeQuantiser(kBlockValues, &MakeQ80); }},
    {"q4_0", [] { return MakeQuantiser(kBlockValues, &MakeQ40); }},
    {"kivi-2", [] { return MakeQuantiser(kKiviGroup, &MakeKivi); }},
    {"turboquant-2", &MakeTurbo<2>},
    {"turboquant-3", &MakeTurbo<3>},
    {"turboquant-4", &MakeTurbo<4>},
    {"turboquant-3.5", [] { return MakeQuantiser(kCodeGroup, &MakeTurboQuantMixed); }},
};

constexpr auto kNames = [] {
  std::array<std::string_view, std::size(kMethods)> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kMethods[i].name;
  return names;
}();

}  // namespace

std::span<const std::string_view> BaselineNames() { return kNames; }

Result<std::unique_ptr<Method>> MakeBaseline(std::string_view name) {
  return GuardAllocation("a method", [&]() -> Result<std::unique_ptr<Method>> {
    std::string known;
    for (const Entry& entry : kMethods) {
      if (entry.name == name) return entry.make();
      known += (known.empty() ? "" : ", ") + std::string(entry.name);
    }
    return InvalidArgument("method '" + std::string(name) + "' is not known; known: " + known);
  });
}

}  // namespace anchorkv
