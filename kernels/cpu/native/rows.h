// Rows of activations in the forms a linear layer reads.
#pragma once

#include "panels.h"

namespace outrider {

// Quantised rows: int8 with one scale for each row and group of 32 (a row's form depends on nothing but the row).
// Rows stand in tiles of `row_tile`, so that a kernel finds a group of all the rows it works on side by side:
// tile t, of R rows, holds [num_groups][R][32] values and [num_groups][R] scales and sums.
struct QuantizedRows {
    int num_rows;
    int num_groups;
    int row_tile;
    int8_t* values;
    float* scales;        // value = scale * int8; NaN where the group held NaN or infinity
    float* scaled_sums;   // scale * sum of the group's int8
    int32_t* value_sums;  // sum of the group's int8
};

static inline int rows_of_tile(int num_rows, int row_tile, int tile) {
    const int left = num_rows - tile * row_tile;
    return left < row_tile ? left : row_tile;
}

// Where (row, group) stands in scales and sums; times 32 in values.
static inline size_t quantized_index(const QuantizedRows& rows, int row, int group) {
    const int tile = row / rows.row_tile, first = tile * rows.row_tile;
    return static_cast<size_t>(first) * rows.num_groups +
           static_cast<size_t>(group) * rows_of_tile(rows.num_rows, rows.row_tile, tile) + (row - first);
}

// What a linear layer multiplies: quantised rows for quantised weights, floats for the others.
struct LinearInput {
    int num_rows;
    const float* floats;  // [num_rows][stride]
    int stride;
    QuantizedRows quantized;
};

}  // namespace outrider
