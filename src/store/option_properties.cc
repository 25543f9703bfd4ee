#include "store/option_properties.h"

#include <string>

#include "format/anchor_layout.h"

namespace anchorkv {
namespace {

template <typename T>
Status ReadName(const Properties& in, const char* name, Result<T> (*parse)(std::string_view), T* value) {
  std::string text;
  AKV_RETURN_IF_ERROR(in.Get(name, &text));
  if (text.empty()) return {};
  const Result<T> parsed = parse(text);
  if (!parsed.ok()) return Unsupported("its property " + std::string(name) + ": " + parsed.status().message());
  *value = *parsed;
  return {};
}

}  // namespace

void SetOptions(const CodecOptions& o, Properties* out) {
  const auto name = [out](const char* property, std::string_view value) { out->Set(property, std::string(value)); };
  const auto number = [out](const char* property, int64_t value) { out->Set(property, value); };
  name("codec.profile", Name(o.profile));
  out->SetReal("codec.theta", o.theta);
  number("codec.window", o.window);
  number("codec.anchors", o.anchors);
  out->SetReal("codec.rho", o.rho);
  number("codec.pool", o.pool);
  number("codec.sinks", o.sinks);
  name("codec.ranking", Name(o.ranking));
  out->SetReal("codec.prior_phi", o.prior_phi);
  number("codec.pool_heads", o.pool_heads);
  out->SetReal("codec.key_share", o.key_share);
  number("codec.residual_bits", o.residual_bits);
  number("codec.wide_bits", o.wide_bits);
  out->SetReal("codec.wide_share", o.wide_share);
  name("codec.surplus", Name(o.surplus));
  name("codec.scale", Name(o.scale));
  name("codec.codebook", Name(o.codebook));
  number("codec.hadamard", o.hadamard);
  number("codec.pre_rope", o.pre_rope);
  out->SetHash("codec.seed", o.seed);
  number("codec.value_basis", o.value_basis);
}

Status ReadOptions(const Properties& in, CodecOptions* o) {
  Profile profile = o->profile;
  AKV_RETURN_IF_ERROR(ReadName(in, "codec.profile", ParseProfile, &profile));
  *o = CodecOptions::ForProfile(profile);
  constexpr int64_t kMost = kMaxAnchors;
  AKV_RETURN_IF_ERROR(in.GetReal("codec.theta", &o->theta));
  AKV_RETURN_IF_ERROR(in.Get("codec.window", 1, kMost, &o->window));
  AKV_RETURN_IF_ERROR(in.Get("codec.anchors", 0, kMost, &o->anchors));
  AKV_RETURN_IF_ERROR(in.GetReal("codec.rho", &o->rho));
  AKV_RETURN_IF_ERROR(in.Get("codec.pool", 1, kMost, &o->pool));
  AKV_RETURN_IF_ERROR(in.Get("codec.sinks", 0, kMost, &o->sinks));
  AKV_RETURN_IF_ERROR(ReadName(in, "codec.ranking", ParseRanking, &o->ranking));
  AKV_RETURN_IF_ERROR(in.GetReal("codec.prior_phi", &o->prior_phi));
  AKV_RETURN_IF_ERROR(in.Get("codec.pool_heads", &o->pool_heads));
  AKV_RETURN_IF_ERROR(in.GetReal("codec.key_share", &o->key_share));
  AKV_RETURN_IF_ERROR(in.Get("codec.residual_bits", 0, 4, &o->residual_bits));
  AKV_RETURN_IF_ERROR(in.Get("codec.wide_bits", 0, 4, &o->wide_bits));
  AKV_RETURN_IF_ERROR(in.GetReal("codec.wide_share", &o->wide_share));
  AKV_RETURN_IF_ERROR(ReadName(in, "codec.surplus", ParseSurplus, &o->surplus));
  AKV_RETURN_IF_ERROR(ReadName(in, "codec.scale", ParseResidualScale, &o->scale));
  AKV_RETURN_IF_ERROR(ReadName(in, "codec.codebook", ParseCodebook, &o->codebook));
  AKV_RETURN_IF_ERROR(in.Get("codec.hadamard", &o->hadamard));
  AKV_RETURN_IF_ERROR(in.Get("codec.pre_rope", &o->pre_rope));
  AKV_RETURN_IF_ERROR(in.GetHash("codec.seed", &o->seed));
  AKV_RETURN_IF_ERROR(in.Get("codec.value_basis", &o->value_basis));
  if (const Status valid = Validate(*o); !valid.ok()) return DataLoss("its options: " + valid.message());
  return {};
}

}  // namespace anchorkv
