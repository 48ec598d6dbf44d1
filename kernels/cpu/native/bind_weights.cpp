// Weights as Python packs them and reads rows of them.
#include <pybind11/stl.h>

#include <optional>

#include "checks.h"
#include "weights.h"

namespace outrider {
namespace {

constexpr const char* kFormatNames[] = {"Q4_0", "Q4_1", "Q8_0", "Q8_CHANNEL", "BF16", "F32"};

WeightFormat weight_format(const std::string& name) {
    for (int i = 0; i < 6; ++i) {
        if (name == kFormatNames[i]) return static_cast<WeightFormat>(i);
    }
    throw std::invalid_argument("no weight format called " + name);
}

const char* format_name(const PackedLinear& linear) { return kFormatNames[static_cast<int>(linear.panels().format)]; }

size_t row_bytes(WeightFormat format, int in_features) {
    switch (format) {
        case WeightFormat::Q4_0: return in_features / kGroupSize * 18;
        case WeightFormat::Q4_1: return in_features / kGroupSize * 20;
        case WeightFormat::Q8_0: return in_features / kGroupSize * 34;
        case WeightFormat::Q8_CHANNEL: return in_features;
        case WeightFormat::BF16: return in_features * size_t{2};
        case WeightFormat::F32: return in_features * size_t{4};
    }
    return 0;
}

std::shared_ptr<PackedLinear> pack_linear(const std::string& format_name, int in_features,
                                          const std::vector<Array<uint8_t>>& blocks,
                                          const std::optional<Array<float>>& channel_scales,
                                          const std::optional<Array<float>>& bias) {
    const WeightFormat format = weight_format(format_name);
    require(in_features > 0, "in_features must be positive");
    require(format > WeightFormat::Q8_0 || in_features % kGroupSize == 0,
            format_name + " has groups of 32 inputs, and " + std::to_string(in_features) + " are not whole groups");
    std::vector<PackedLinear::StoredRows> stored;
    py::ssize_t num_rows = 0;
    const size_t bytes = row_bytes(format, in_features);
    for (const Array<uint8_t>& weight : blocks) {
        require_shape(weight, {weight.ndim() > 0 ? weight.shape(0) : 0, static_cast<py::ssize_t>(bytes)}, "blocks");
        stored.push_back({weight.data(), bytes, static_cast<int>(weight.shape(0))});
        num_rows += weight.shape(0);
    }
    require(channel_scales.has_value() == (format == WeightFormat::Q8_CHANNEL), "channel_scales are for Q8_CHANNEL");
    if (channel_scales) require_shape(*channel_scales, {num_rows}, "channel_scales");
    if (bias) require_shape(*bias, {num_rows}, "bias");
    const py::gil_scoped_release release;
    return std::make_shared<PackedLinear>(format, in_features, stored, channel_scales ? channel_scales->data() : nullptr,
                                          bias ? bias->data() : nullptr);
}

void unpack_rows(const PackedLinear& linear, const Array<int64_t>& channels, Array<float>& to) {
    const Panels& panels = linear.panels();
    const int in_features = panels.in_features, last = panels.num_panels - 1;
    require(last < 0 || panels.first_columns[last] == last * kPanelChannels,
            "rows of a layer that stacks several weights cannot be unpacked");
    require_shape(to, {channels.size(), in_features}, "to");
    const int64_t* ids = channels.data();
    for (py::ssize_t i = 0; i < channels.size(); ++i) {
        require(ids[i] >= 0 && ids[i] < panels.out_features,
                "row " + std::to_string(ids[i]) + " of a table with " + std::to_string(panels.out_features));
        linear.unpack_row(static_cast<int>(ids[i]), to.mutable_data() + i * in_features);
    }
}

}  // namespace

void bind_weights(py::module_& module) {
    py::class_<PackedLinear, std::shared_ptr<PackedLinear>>(module, "PackedLinear")
        .def_property_readonly("in_features", [](const PackedLinear& linear) { return linear.panels().in_features; })
        .def_property_readonly("out_features", [](const PackedLinear& linear) { return linear.panels().out_features; })
        .def_property_readonly("num_bytes", &PackedLinear::num_bytes)
        .def("unpack_rows", &unpack_rows, py::arg("channels").noconvert(), py::arg("to").noconvert());
    module.def("pack_linear", &pack_linear, py::arg("format"), py::arg("in_features"), py::arg("blocks"),
               py::arg("channel_scales") = py::none(), py::arg("bias") = py::none());
    module.def("weight_format", &format_name, py::arg("linear"), "The form in which its weights are kept.");
}

}  // namespace outrider
