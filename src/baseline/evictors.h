// Eviction methods as Method objects: how the bytes are divided among layers, then selection and gathering.
#pragma once

#include <memory>

#include "baseline/eviction.h"
#include "baseline/method.h"

namespace anchorkv {

// Every layer keeps what its own bytes buy, chosen by `select`.
std::unique_ptr<Method> MakeEvictor(const Observations& observations, Select select);
// SnapKV with fewer rows the higher the layer.
std::unique_ptr<Method> MakePyramidKv();
// One ranking over all layers and heads.
std::unique_ptr<Method> MakeKvZip();

}  // namespace anchorkv
