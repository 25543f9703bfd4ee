// Failing the allocations of a call one by one. For programs that contain failing_allocation.cc.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "anchorkv/status.h"
#include "base/aligned_buffer.h"
#include "support/failing_allocation.h"

namespace anchorkv::test {

// One thread: which allocation is the n-th does not depend on timing then.
class OneThread : public ::testing::Environment {
  void SetUp() override { omp_set_num_threads(1); }
};
[[maybe_unused]] inline const ::testing::Environment* const kOneThread =
    ::testing::AddGlobalTestEnvironment(new OneThread);  // owned by GoogleTest

// Runs `call` with its first, second, ... allocation failing until none fails any more. Between the calls `check`
// looks whether what they work on is unchanged; the last call of each round succeeds and `undo` takes its effect back.
inline void FailEach(const std::string& what, const std::function<Status()>& call,
                     const std::function<void()>& check = {}, const std::function<void()>& undo = {}) {
  const Status first = call();
  ASSERT_TRUE(first.ok()) << what << ": " << first.message();  // fills tables that are made once
  if (undo) undo();
  for (const Failing which : {Failing::kOne, Failing::kAllLater}) {
    for (int64_t n = 1;; ++n) {
      const std::string where =
          what + ", allocation " + std::to_string(n) + (which == Failing::kAllLater ? " and all later ones" : "");
      ASSERT_LT(n, 20000) << where;
      const int64_t blocks = LiveBlocks(), bytes = GetAllocationStats().current_bytes;
      bool ok = false, out_of_memory = false, failed = false;
      try {
        FailAllocation(n, which);
        const Status status = call();
        failed = StopFailing();
        ok = status.ok();
        out_of_memory = status.code() == StatusCode::kOutOfMemory && !status.message().empty();
      } catch (const std::bad_alloc&) {
        StopFailing();
        FAIL() << where << " throws";
      }
      if (!failed) {
        ASSERT_TRUE(ok) << where;
        if (undo) undo();
        ASSERT_GT(n, 1) << what << " allocates nothing";
        break;
      }
      // An algorithm of the standard library may do without what it did not get.
      ASSERT_TRUE(ok || out_of_memory) << where;
      if (ok && undo) undo();
      if (!ok) {
        ASSERT_EQ(LiveBlocks(), blocks) << where;
        ASSERT_EQ(GetAllocationStats().current_bytes, bytes) << where;
      }
      if (check) check();
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// FailEach of a call that may do without memory.
inline void FailEachIfAny(const std::string& what, const std::function<Status()>& call) {
  FailAllocation(1, Failing::kAllLater);
  const Status without_memory = call();
  if (StopFailing()) {
    FailEach(what, call);
  } else {
    EXPECT_TRUE(without_memory.ok()) << what;
  }
}

// The status of a result that is thrown away.
template <typename T>
Status StatusOf(Result<T> result) {
  return std::move(result).status();
}

}  // namespace anchorkv::test
