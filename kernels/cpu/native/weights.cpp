#include "weights.h"

#include <algorithm>
#include <cstring>

#include "float_formats.h"

namespace outrider {

namespace {

constexpr size_t kQ4Group = kGroupSize / 2 * kPanelChannels;
constexpr size_t kQ8Group = kGroupSize * kPanelChannels;
constexpr size_t kHalves = kPanelChannels * sizeof(uint16_t);

size_t quants_bytes_of(WeightFormat format, int in_features, int num_groups) {
    switch (format) {
        case WeightFormat::Q4_0:
        case WeightFormat::Q4_1:
            return num_groups * kQ4Group;
        case WeightFormat::Q8_0:
        case WeightFormat::Q8_CHANNEL:
            return num_groups * kQ8Group;
        case WeightFormat::BF16:
            return in_features * kPanelChannels * sizeof(uint16_t);
        case WeightFormat::F32:
            return in_features * kPanelChannels * sizeof(float);
    }
    return 0;
}

size_t scales_bytes_of(WeightFormat format, int num_groups) {
    switch (format) {
        case WeightFormat::Q4_0:
        case WeightFormat::Q8_0:
            return num_groups * kHalves;
        case WeightFormat::Q4_1:
            return num_groups * 2 * kHalves;
        case WeightFormat::Q8_CHANNEL:
            return kPanelChannels * sizeof(float);
        default:
            return 0;
    }
}

// Where a panel keeps input k of a channel: the byte, for 4 bits the one it shares with input k + 16 or k - 16.
size_t q4_byte(int k, int channel) {
    return k / kGroupSize * kQ4Group + k % 16 / 4 * 64 + channel * 4 + k % 4;
}
size_t q8_byte(int k, int channel) { return k / 4 * size_t{64} + channel * 4 + k % 4; }

class PanelWriter {
  public:
    PanelWriter(const Panels& linear, uint8_t* panel) : linear_(linear), panel_(panel) {
        // What no weight is stored for must count as zero: 8 in Q4_0, 128 in the 8-bit formats.
        const uint8_t zero = linear.format == WeightFormat::Q4_0                                      ? 0x88
                             : linear.format == WeightFormat::Q8_0 || linear.format == WeightFormat::Q8_CHANNEL ? 0x80
                                                                                                      : 0;
        std::memset(panel, zero, linear.quants_bytes);
    }

    void write(int channel, const uint8_t* row, float channel_scale) {
        switch (linear_.format) {
            case WeightFormat::Q4_0:
                return write_q4(channel, row, 18, false);
            case WeightFormat::Q4_1:
                return write_q4(channel, row, 20, true);
            case WeightFormat::Q8_0:
                return write_q8(channel, row);
            case WeightFormat::Q8_CHANNEL:
                return write_q8_channel(channel, row, channel_scale);
            case WeightFormat::BF16:
                return write_floats<uint16_t>(channel, row);
            case WeightFormat::F32:
                return write_floats<float>(channel, row);
        }
    }

  private:
    uint8_t* scales() { return panel_ + linear_.quants_bytes; }

    // GGUF: scale, minimum if there is one, then 16 bytes with weight i low and weight i + 16 high.
    void write_q4(int channel, const uint8_t* row, size_t block_bytes, bool has_minimum) {
        const size_t header = has_minimum ? 4 : 2, group_scales = has_minimum ? 2 * kHalves : kHalves;
        for (int group = 0; group < linear_.in_features / kGroupSize; ++group) {
            const uint8_t* block = row + group * block_bytes;
            for (int i = 0; i < 16; ++i) panel_[q4_byte(group * kGroupSize + i, channel)] = block[header + i];
            std::memcpy(scales() + group * group_scales + channel * 2, block, 2);
            if (has_minimum) std::memcpy(scales() + group * group_scales + kHalves + channel * 2, block + 2, 2);
        }
    }

    // GGUF: scale, then 32 signed bytes.
    void write_q8(int channel, const uint8_t* row) {
        for (int group = 0; group < linear_.in_features / kGroupSize; ++group) {
            const uint8_t* block = row + group * size_t{34};
            for (int i = 0; i < kGroupSize; ++i) panel_[q8_byte(group * kGroupSize + i, channel)] = block[2 + i] ^ 0x80;
            std::memcpy(scales() + group * kHalves + channel * 2, block, 2);
        }
    }

    void write_q8_channel(int channel, const uint8_t* row, float scale) {
        for (int k = 0; k < linear_.in_features; ++k) panel_[q8_byte(k, channel)] = row[k] ^ 0x80;
        std::memcpy(scales() + channel * sizeof scale, &scale, sizeof scale);
    }

    template <typename Value>
    void write_floats(int channel, const uint8_t* row) {
        for (int k = 0; k < linear_.in_features; ++k) {
            std::memcpy(panel_ + (size_t(k) * kPanelChannels + channel) * sizeof(Value), row + k * sizeof(Value),
                        sizeof(Value));
        }
    }

    const Panels& linear_;
    uint8_t* panel_;
};

}  // namespace

PackedLinear::PackedLinear(WeightFormat format, int in_features, const std::vector<StoredRows>& stored,
                           const float* channel_scales, const float* bias) {
    panels_.format = format;
    panels_.in_features = in_features;
    panels_.num_groups = (in_features + kGroupSize - 1) / kGroupSize;
    panels_.quants_bytes = quants_bytes_of(format, in_features, panels_.num_groups);
    panels_.panel_bytes = (panels_.quants_bytes + scales_bytes_of(format, panels_.num_groups) + 63) / 64 * 64;
    for (const StoredRows& weight : stored) {
        for (int row = 0; row < weight.num_rows; row += kPanelChannels) {
            first_columns_.push_back(panels_.out_features + row);
            num_columns_.push_back(std::min(kPanelChannels, weight.num_rows - row));
        }
        panels_.out_features += weight.num_rows;
    }
    panels_.num_panels = static_cast<int>(first_columns_.size());
    panels_.first_columns = first_columns_.data();
    panels_.num_columns = num_columns_.data();
    data_ = HugeBuffer(panels_.num_panels * panels_.panel_bytes);
    panels_.data = data_.bytes();
    if (bias != nullptr) {
        bias_.assign(static_cast<size_t>(panels_.num_panels) * kPanelChannels, 0.0f);
        panels_.bias = bias_.data();
    }
    int panel = 0;
    for (const StoredRows& weight : stored) {
        for (int row = 0; row < weight.num_rows; row += kPanelChannels, ++panel) {
            PanelWriter writer(panels_, data_.bytes() + panel * panels_.panel_bytes);
            for (int channel = 0; channel < num_columns_[panel]; ++channel) {
                const int column = first_columns_[panel] + channel;
                const float scale = channel_scales != nullptr ? channel_scales[column] : 0.0f;
                writer.write(channel, weight.blocks + (row + channel) * weight.row_bytes, scale);
                if (bias != nullptr) bias_[panel * kPanelChannels + channel] = bias[column];
            }
        }
    }
}

void PackedLinear::unpack_row(int channel, float* values) const {
    const Panels& linear = panels_;
    const int panel = channel / kPanelChannels, lane = channel % kPanelChannels;
    const uint8_t* quants = panel_data(linear, panel);
    const uint8_t* scales = quants + linear.quants_bytes;
    const auto half = [&](size_t byte) {
        uint16_t bits;
        std::memcpy(&bits, scales + byte + lane * 2, sizeof bits);
        return f16_to_f32(bits);
    };
    for (int k = 0; k < linear.in_features; ++k) {
        const int group = k / kGroupSize;
        switch (linear.format) {
            case WeightFormat::Q4_0:
            case WeightFormat::Q4_1: {
                const int byte = quants[q4_byte(k, lane)], q = k % kGroupSize < 16 ? byte & 15 : byte >> 4;
                values[k] = linear.format == WeightFormat::Q4_0
                                ? static_cast<float>(q - 8) * half(group * kHalves)
                                : static_cast<float>(q) * half(group * 2 * kHalves) + half(group * 2 * kHalves + kHalves);
                break;
            }
            case WeightFormat::Q8_0:
                values[k] = static_cast<float>(quants[q8_byte(k, lane)] - 128) * half(group * kHalves);
                break;
            case WeightFormat::Q8_CHANNEL: {
                float scale;
                std::memcpy(&scale, scales + lane * sizeof scale, sizeof scale);
                values[k] = static_cast<float>(quants[q8_byte(k, lane)] - 128) * scale;
                break;
            }
            case WeightFormat::BF16: {
                uint16_t bits;
                std::memcpy(&bits, quants + (size_t(k) * kPanelChannels + lane) * 2, sizeof bits);
                values[k] = bf16_to_f32(bits);
                break;
            }
            case WeightFormat::F32:
                std::memcpy(&values[k], quants + (size_t(k) * kPanelChannels + lane) * 4, 4);
                break;
        }
    }
}

}  // namespace outrider
