// Packing a checkpoint's weights into panels.
#pragma once

#include <memory>
#include <vector>

#include "huge_buffer.h"
#include "panels.h"

namespace outrider {

// A linear layer and the memory its panels lie in.
class PackedLinear {
  public:
    // Rows of one weight as its file stores them.
    struct StoredRows {
        const uint8_t* blocks;
        size_t row_bytes;
        int num_rows;
    };

    // `stored` holds GGUF blocks of the format (Q4_0, Q4_1, Q8_0), bf16 or f32 values; for Q8_CHANNEL int8 values.
    // `channel_scales`: [sum of num_rows], only for Q8_CHANNEL. `bias`: [sum of num_rows] or null.
    PackedLinear(WeightFormat format, int in_features, const std::vector<StoredRows>& stored,
                 const float* channel_scales, const float* bias);
    PackedLinear(const PackedLinear&) = delete;
    PackedLinear& operator=(const PackedLinear&) = delete;

    const Panels& panels() const { return panels_; }
    size_t num_bytes() const { return data_.size(); }

    // Row `channel` of a layer that holds one weight, as floats [in_features]: what an embedding table gives.
    void unpack_row(int channel, float* values) const;

  private:
    Panels panels_{};
    HugeBuffer data_;
    std::vector<int32_t> first_columns_;
    std::vector<int32_t> num_columns_;
    std::vector<float> bias_;
};

}  // namespace outrider
