// The kernels as the rest of the program sees them: one table of functions for each instruction set.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "ceilings.h"
#include "kv_cache.h"
#include "rows.h"

namespace outrider {

struct Kernels {
    const char* instruction_set;
    int row_tile;  // of QuantizedRows

    // linear.h
    void (*linear_panels)(const Panels& linear, const LinearInput& input, int begin, int end, int first_tile,
                          int last_tile, bool accumulate, float* to, int to_stride);
    void (*swiglu_units)(const Panels& gate_up, const LinearInput& input, int intermediate, int begin, int end,
                         int first_tile, int last_tile, const QuantizedRows* quantized, float* floats, int stride);
    // row_kernels.h
    void (*rms_norm_row)(const float* x, const float* weight, int n, float eps, float* to);
    void (*add_row)(const float* x, int n, float* to);
    void (*rotate_head)(float* head, const float* cos, const float* sin, int half);
    void (*silu_mul_row)(const float* gate, const float* up, int n, float* to);
    void (*quantize_row)(const float* x, int n, int row, const QuantizedRows& rows);
    // choice_kernels.h
    int32_t (*argmax_row)(const float* x, int n);
    void (*top_k_row)(const float* x, int n, int k, float* values, int32_t* indexes);
    int32_t (*race_candidates_row)(const float* x, int n, float temperature, uint64_t draw, const int64_t* token_map,
                                   int32_t* candidates);
    float (*probability_row)(const float* x, int n, int32_t index, float largest, float temperature);
    // kv_write.h, attention.h
    void (*write_kv)(const KvLayout& layout, int64_t slot, const float* key, const float* value, uint8_t* keys,
                     uint8_t* values);
    void (*attend_item)(const AttentionPass& pass, const AttentionLayer& layer, const AttentionItem& item,
                        float* scratch);
    // ceiling_loops.h
    CeilingLoops ceilings;
};

// The instruction sets this build has and this CPU can run, best first; "scalar" is always among them.
std::vector<std::string> instruction_sets();

// The best, or what the environment variable OUTRIDER_CPU_ISA names. Throws as kernels_for does.
std::string selected_instruction_set();

// Throws std::invalid_argument if there is none of that name here.
const Kernels& kernels_for(const std::string& instruction_set);

}  // namespace outrider
