// Contexts in a Redis server, so that several programs on several machines share them. A library of its own
// (anchorkv_redis), so that the core needs no Redis client.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "store/context_store.h"

namespace anchorkv {

// `address`: [PASSWORD@]HOST[:PORT][/DATABASE], port 6379 and database 0 where they are not given. `limit_bytes` of
// files; 0: as Redis is configured (maxmemory).
//
// A context is the bytes of its .akv file under anchorkv:context:KEY, written aside and renamed when complete;
// anchorkv:used (a sorted set: time of last use) and anchorkv:bytes, anchorkv:tokens (hashes) describe them. What Redis
// evicts by itself is not found, and forgotten when it is looked for. Contexts of more than 512 MB, Redis' limit of a
// value, are kInfeasible.
//
// kInvalidArgument for an address that is none, kNotFound when no server answers there now. Later failures of the
// connection are kInternal; the next call connects again.
Result<std::unique_ptr<ContextStore>> MakeRedisStore(const std::string& address, int64_t limit_bytes);

}  // namespace anchorkv
