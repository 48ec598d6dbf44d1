// The table of one instruction set's kernels; isa_*.cpp include it once each.
#pragma once

#include <cmath>
#include <cstring>

#include "attention.h"
#include "choice_kernels.h"
#include "ceiling_loops.h"
#include "kernels.h"
#include "kv_write.h"
#include "linear.h"
#include "row_kernels.h"

namespace outrider {
namespace OUTRIDER_ISA {

void attend(const AttentionPass& pass, const AttentionLayer& layer, const AttentionItem& item, float* scratch) {
    attend_item(pass, layer, item, scratch);
}

extern const Kernels kKernels;
const Kernels kKernels = {kIsaName,     kRowTile,   linear_panels, swiglu_units, rms_norm_row, add_row,
                          rotate_head,  silu_mul_row, quantize_row, argmax_row,  top_k_row,     race_candidates_row,
                          probability_row, write_kv,     attend,
                          {read_loop, multiply_int8_loop, multiply_f32_loop}};

}  // namespace OUTRIDER_ISA
}  // namespace outrider
