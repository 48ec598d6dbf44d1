// Memory for rows on their way into a linear layer. Whoever writes them fills the form that layer reads: quantised
// for quantised weights, else floats.
#pragma once

#include <vector>

#include "rows.h"

namespace outrider {

class Activations {
  public:
    // Room for `num_rows` rows of `in_features`; keeps what it has.
    void prepare(int num_rows, int in_features, int row_tile) {
        const int num_groups = (in_features + kGroupSize - 1) / kGroupSize;
        const size_t groups = static_cast<size_t>(num_rows) * num_groups;
        grow(floats_, static_cast<size_t>(num_rows) * in_features);
        grow(values_, groups * kGroupSize);
        grow(scales_, groups);
        grow(scaled_sums_, groups);
        grow(value_sums_, groups);
        input_ = {num_rows, floats_.data(), in_features,
                  {num_rows, num_groups, row_tile, values_.data(), scales_.data(), scaled_sums_.data(),
                   value_sums_.data()}};
    }

    const LinearInput& input() const { return input_; }
    float* floats(int row) { return floats_.data() + static_cast<size_t>(row) * input_.stride; }

  private:
    template <typename Value>
    static void grow(std::vector<Value>& values, size_t size) {
        if (values.size() < size) values.resize(size);
    }

    LinearInput input_{};
    std::vector<float> floats_;
    std::vector<int8_t> values_;
    std::vector<float> scales_;
    std::vector<float> scaled_sums_;
    std::vector<int32_t> value_sums_;
};

}  // namespace outrider
