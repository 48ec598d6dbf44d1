// Sixteen lanes: the one vocabulary every kernel is written in.
//
// Each instruction set spells `F32x16` and `I32x16` in its own registers (one of AVX-512, two of AVX2, four of
// NEON, an array). The operations are the same IEEE operations in the same order everywhere, fused multiply-adds
// included, so a kernel written over them gives the same bits on every machine. Nothing here may be contracted,
// reassociated or approximated: no -ffast-math, no rsqrt, no rcp.
//
// A file that compiles kernels defines exactly one of OUTRIDER_ISA_SCALAR, _AVX2, _AVX512 or _NEON and gets
// everything in a namespace of that name, so that no two instruction sets share a symbol.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(OUTRIDER_ISA_AVX512)
#define OUTRIDER_ISA avx512
#include "simd_avx512.h"
#elif defined(OUTRIDER_ISA_AVX2)
#define OUTRIDER_ISA avx2
#include "simd_avx2.h"
#elif defined(OUTRIDER_ISA_NEON)
#define OUTRIDER_ISA neon
#include "simd_neon.h"
#elif defined(OUTRIDER_ISA_SCALAR)
#define OUTRIDER_ISA scalar
#include "simd_scalar.h"
#else
#error "define the instruction set before including simd.h"
#endif

#include "float_formats.h"

namespace outrider {
namespace OUTRIDER_ISA {

constexpr int kLanes = 16;

// The first n lanes from memory, zeros in the others; reads nothing behind them.
OUTRIDER_HOT F32x16 load_first(const float* from, int n) {
    if (n >= kLanes) return load(from);
    float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = from[i];
    return load(lanes);
}

inline void store_first(float* to, F32x16 x, int n) {
    if (n >= kLanes) return store(to, x);
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < n; ++i) to[i] = lanes[i];
}

// The first n lanes of x, `other` in the rest.
OUTRIDER_HOT F32x16 keep_first(F32x16 x, int n, F32x16 other) {
    return select_less(lane_numbers(), splat(static_cast<float>(n)), x, other);
}

// e^x, relative error below 2e-7; 0 below -87 (so for -infinity), e^88 above 88, NaN for NaN.
// Cody and Waite's reduction to |r| <= ln(2)/2, then Taylor's polynomial of degree 6 (remainder r^7/5040 < 1.2e-7).
OUTRIDER_HOT F32x16 exponential(F32x16 x) {
    const F32x16 kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const F32x16 clamped = minimum(splat(88.0f), x);
    const F32x16 shifted = fma(clamped, splat(1.44269504088896341f), kRound);
    const F32x16 n = sub(shifted, kRound);
    F32x16 r = fma(n, splat(-0.693145751953125f), clamped);
    r = fma(n, splat(-1.428606820309417e-06f), r);
    F32x16 p = splat(1.0f / 720.0f);
    p = fma(p, r, splat(1.0f / 120.0f));
    p = fma(p, r, splat(1.0f / 24.0f));
    p = fma(p, r, splat(1.0f / 6.0f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    const F32x16 power = as_float(shift_left_23(add(as_int(shifted), splat_int(127))));
    return select_less(x, splat(-87.0f), splat(0.0f), mul(p, power));
}

OUTRIDER_HOT F32x16 silu(F32x16 x) { return div(x, add(splat(1.0f), exponential(sub(splat(0.0f), x)))); }

}  // namespace OUTRIDER_ISA
}  // namespace outrider
