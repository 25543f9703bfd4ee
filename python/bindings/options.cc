#include "options.h"

#include <nanobind/stl/string.h>

#include <cmath>
#include <functional>
#include <map>

#include "arrays.h"

namespace anchorkv::python {
namespace {

template <typename T>
T Cast(const std::string& name, nb::handle value) {
  T out{};
  if (!nb::try_cast<T>(value, out)) {
    Raise(InvalidArgument(name + " is " + nb::cast<std::string>(nb::repr(value)) + ", which is of the wrong type"));
  }
  return out;
}

using Setter = std::function<void(CodecOptions*, const std::string&, nb::handle)>;

template <typename T, typename U>
Setter Plain(U CodecOptions::*field) {
  return [field](CodecOptions* o, const std::string& name, nb::handle value) {
    o->*field = static_cast<U>(Cast<T>(name, value));
  };
}

template <typename U>
Setter Named(U CodecOptions::*field, Result<U> (*parse)(std::string_view)) {
  return [field, parse](CodecOptions* o, const std::string& name, nb::handle value) {
    o->*field = Checked(parse(Cast<std::string>(name, value)));
  };
}

const std::map<std::string, Setter>& Setters() {
  static const std::map<std::string, Setter> setters = {
      {"window", Plain<int>(&CodecOptions::window)},
      {"anchors", Plain<int64_t>(&CodecOptions::anchors)},
      {"rho", Plain<double>(&CodecOptions::rho)},
      {"pool", Plain<int>(&CodecOptions::pool)},
      {"sinks", Plain<int>(&CodecOptions::sinks)},
      {"ranking", Named(&CodecOptions::ranking, &ParseRanking)},
      {"prior_phi", Plain<double>(&CodecOptions::prior_phi)},
      {"pool_heads", Plain<bool>(&CodecOptions::pool_heads)},
      {"key_share", Plain<double>(&CodecOptions::key_share)},
      {"residual_bits", Plain<int>(&CodecOptions::residual_bits)},
      {"wide_bits", Plain<int>(&CodecOptions::wide_bits)},
      {"wide_share", Plain<double>(&CodecOptions::wide_share)},
      {"surplus", Named(&CodecOptions::surplus, &ParseSurplus)},
      {"scale", Named(&CodecOptions::scale, &ParseResidualScale)},
      {"codebook", Named(&CodecOptions::codebook, &ParseCodebook)},
      {"hadamard", Plain<bool>(&CodecOptions::hadamard)},
      {"pre_rope", Plain<bool>(&CodecOptions::pre_rope)},
      {"seed", Plain<uint64_t>(&CodecOptions::seed)},
      {"value_basis", Plain<bool>(&CodecOptions::value_basis)},
  };
  return setters;
}

}  // namespace

CodecOptions OptionsFrom(double ratio, const std::string& profile, const nb::kwargs& changes) {
  if (!(std::isfinite(ratio) && ratio >= 0.5)) {
    Raise(InvalidArgument("ratio is " + nb::cast<std::string>(nb::str(nb::float_(ratio))) +
                          "; it must be finite and at least 0.5"));
  }
  CodecOptions options = CodecOptions::ForProfile(Checked(ParseProfile(profile)));
  options.theta = 1.0 / ratio;
  for (const auto& [key, value] : changes) {
    const auto name = nb::cast<std::string>(key);
    const auto setter = Setters().find(name);
    if (setter == Setters().end()) {
      std::string known;
      for (const auto& [each, unused] : Setters()) known += (known.empty() ? "" : ", ") + each;
      Raise(InvalidArgument("unknown option '" + name + "'; known: " + known));
    }
    setter->second(&options, name, value);
  }
  Check(Validate(options));
  return options;
}

const Backend& BackendNamed(const std::string& name) {
  if (name == "reference") return ReferenceBackend();
  if (name != "cpu") Raise(InvalidArgument("backend is '" + name + "'; allowed are cpu and reference"));
  const Backend* fast = CpuBackend();
  return fast != nullptr ? *fast : ReferenceBackend();
}

}  // namespace anchorkv::python
