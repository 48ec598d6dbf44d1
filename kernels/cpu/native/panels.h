// Weights of a linear layer, in the order the kernels stream them.
//
// A *panel* is 16 output channels, one per lane. Its inputs come in groups of 32 that share a scale; k runs through
// a group four inputs at a time, since a lane holds four consecutive inputs of its channel. A panel is
//
//   quantised:  [num_groups][quants: 256 bytes (4 bit) or 512 (8 bit)], then
//               [num_groups][16 scales (f16), and for Q4_1 16 minima (f16)], or for Q8_CHANNEL [16 scales (f32)]
//   float:      [in_features][16] of bf16 or f32
//
// 4-bit weights are unsigned, input 4j+i of a channel in the low nibble of byte [j][channel][i] and input 16+4j+i
// in the high one. 8-bit weights are stored plus 128. Inputs missing in the last group, and channels missing in a
// panel, are zero weights; several weights stacked into one layer start at a panel each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

constexpr int kPanelChannels = 16;
constexpr int kGroupSize = 32;

enum class WeightFormat : int {
    Q4_0,        // (q - 8) * scale
    Q4_1,        // q * scale + minimum
    Q8_0,        // q * scale
    Q8_CHANNEL,  // q * scale, one scale for each channel
    BF16,
    F32,
};

constexpr bool is_quantized(WeightFormat format) { return format < WeightFormat::BF16; }

// A linear layer as the kernels see it. No member functions here or in rows.h: these headers are compiled for
// several instruction sets, and the linker would keep one copy for all.
struct Panels {
    WeightFormat format;
    int in_features;
    int num_groups;  // of inputs, the last one padded with zeros
    int out_features;
    int num_panels;
    size_t panel_bytes;
    size_t quants_bytes;           // of one panel
    const uint8_t* data;           // [num_panels][panel_bytes]
    const int32_t* first_columns;  // [num_panels], the output column of each panel's first channel
    const int32_t* num_columns;    // [num_panels], how many of its channels are real
    const float* bias;             // [num_panels][16], or null
};

static inline const uint8_t* panel_data(const Panels& panels, int index) {
    return panels.data + static_cast<size_t>(index) * panels.panel_bytes;
}

}  // namespace outrider
