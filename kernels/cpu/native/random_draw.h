// The numbers of tokens in a random race.
#pragma once

#include <cstdint>

namespace outrider {

constexpr double kDrawUnit = 1.0 / 9007199254740992.0;  // 2^-53

// The number that token `id` has in a draw, 53 bits (SplitMix64, Steele et al. 2014). Of internal linkage, as kv_cache.h
// says.
static inline uint64_t draw_bits(uint64_t draw, uint64_t id) {
    uint64_t bits = id * 0x9E3779B97F4A7C15u + draw;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return (bits ^ (bits >> 31)) >> 11;
}

}  // namespace outrider
