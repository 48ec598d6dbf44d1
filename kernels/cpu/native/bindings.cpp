// The Python module. Arrays come as numpy arrays over the caller's memory; shapes are checked here, once a pass.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>

#include "activations.h"
#include "checks.h"
#include "each_row.h"

namespace outrider {
namespace {

void linear(Machine& machine, const Array<float>& x, const std::shared_ptr<PackedLinear>& packed, Array<float>& to) {
    const Panels& panels = packed->panels();
    require(x.ndim() == 2, "x must be [num_rows, in_features]");
    const int num_rows = static_cast<int>(x.shape(0)), tile = machine.kernels.row_tile;
    require_shape(x, {num_rows, panels.in_features}, "x");
    require_shape(to, {num_rows, panels.out_features}, "to");
    if (num_rows == 0) return;
    auto rows = std::make_shared<Activations>();
    rows->prepare(num_rows, panels.in_features, tile);
    const float* from = x.data();
    float* out = to.mutable_data();
    const bool quantized = is_quantized(panels.format);
    const LinearChunks chunks(panels.num_panels, panels.panel_bytes, num_rows, tile);
    const py::gil_scoped_release release;
    machine.pool.run([=, &machine, &panels](Team& team) {
        const Kernels& kernels = machine.kernels;
        LinearInput input = rows->input();
        if (quantized) {
            team.parallel_for(num_rows, [&](int row) {
                const float* values = from + static_cast<size_t>(row) * panels.in_features;
                kernels.quantize_row(values, panels.in_features, row, input.quantized);
            });
        } else {
            input.floats = from;
        }
        team.parallel_for(chunks.count(), [&](int chunk) {
            chunks.run(chunk, [&](int begin, int end, int first_tile, int last_tile) {
                kernels.linear_panels(panels, input, begin, end, first_tile, last_tile, false, out,
                                      panels.out_features);
            });
        });
    });
}

// weight: [n], or [num_heads * n] for rows of num_heads vectors.
void rms_norm(Machine& machine, const Array<float>& x, const Array<float>& weight, float eps, Array<float>& to) {
    require(x.ndim() == 2 && weight.ndim() == 2 && weight.shape(0) > 0, "x and weight must have two axes");
    require_shape(weight, {weight.shape(0), x.shape(1)}, "weight");
    require_shape(to, {x.shape(0), x.shape(1)}, "to");
    const float *from = x.data(), *weights = weight.data();
    float* out = to.mutable_data();
    const int n = static_cast<int>(x.shape(1)), num_weights = static_cast<int>(weight.shape(0));
    const Kernels* kernels = &machine.kernels;
    each_row(machine, x.shape(0), [=](int row) {
        const size_t at = static_cast<size_t>(row) * n;
        kernels->rms_norm_row(from + at, weights + static_cast<size_t>(row % num_weights) * n, n, eps, out + at);
    });
}

// x: [num_rows, num_heads, head_dim], changed in place; cos, sin: [num_rows, head_dim / 2].
void rotary(Machine& machine, Array<float>& x, const Array<float>& cos, const Array<float>& sin) {
    require(x.ndim() == 3 && x.shape(2) % 2 == 0, "x must be [num_rows, num_heads, head_dim], head_dim even");
    require_shape(cos, {x.shape(0), x.shape(2) / 2}, "cos");
    require_shape(sin, {x.shape(0), x.shape(2) / 2}, "sin");
    float* rows = x.mutable_data();
    const float *cosines = cos.data(), *sines = sin.data();
    const int num_heads = static_cast<int>(x.shape(1)), head_dim = static_cast<int>(x.shape(2)), half = head_dim / 2;
    const Kernels* kernels = &machine.kernels;
    each_row(machine, x.shape(0), [=](int row) {
        for (int head = 0; head < num_heads; ++head) {
            kernels->rotate_head(rows + (static_cast<size_t>(row) * num_heads + head) * head_dim,
                                 cosines + static_cast<size_t>(row) * half, sines + static_cast<size_t>(row) * half,
                                 half);
        }
    });
}

void silu_mul(Machine& machine, const Array<float>& gate_up, Array<float>& to) {
    require(gate_up.ndim() == 2 && gate_up.shape(1) % 2 == 0, "gate_up must be [num_rows, 2 * n]");
    require_shape(to, {gate_up.shape(0), gate_up.shape(1) / 2}, "to");
    const float* from = gate_up.data();
    float* out = to.mutable_data();
    const int n = static_cast<int>(gate_up.shape(1) / 2);
    const Kernels* kernels = &machine.kernels;
    each_row(machine, gate_up.shape(0), [=](int row) {
        const float* gate = from + static_cast<size_t>(row) * 2 * n;
        kernels->silu_mul_row(gate, gate + n, n, out + static_cast<size_t>(row) * n);
    });
}

void argmax(Machine& machine, const Array<float>& logits, Array<int64_t>& to) {
    require(logits.ndim() == 2 && logits.shape(1) > 0, "logits must be [num_rows, vocab_size]");
    require_shape(to, {logits.shape(0)}, "to");
    const float* rows = logits.data();
    int64_t* out = to.mutable_data();
    const int n = static_cast<int>(logits.shape(1)), num_rows = static_cast<int>(logits.shape(0));
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(num_rows,
                          [&](int row) { out[row] = kernels->argmax_row(rows + static_cast<size_t>(row) * n, n); });
    });
}

// `values`, `ids`: [num_rows, k].
void top_k(Machine& machine, const Array<float>& logits, Array<float>& values, Array<int32_t>& ids) {
    const int num_rows = static_cast<int>(axis_size(logits, 0)), n = static_cast<int>(axis_size(logits, 1));
    const int k = static_cast<int>(axis_size(values, 1));
    require_shape(logits, {num_rows, n}, "logits");
    require(0 < k && k <= n, "k must be from 1 to " + std::to_string(n) + ", not " + std::to_string(k));
    require_shape(values, {num_rows, k}, "values");
    require_shape(ids, {num_rows, k}, "ids");
    const float* rows = logits.data();
    float* top = values.mutable_data();
    int32_t* out = ids.mutable_data();
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(num_rows, [&](int row) {
            const size_t at = static_cast<size_t>(row) * k;
            kernels->top_k_row(rows + static_cast<size_t>(row) * n, n, k, top + at, out + at);
        });
    });
}

// `ids`: [vocab_size], of which the first are filled; returns how many.
int race_candidates(Machine& machine, const Array<float>& logits, float temperature, uint64_t draw,
                    Array<int32_t>& ids, const std::optional<Array<int64_t>>& token_map) {
    const py::ssize_t n = axis_size(logits, 0);
    require_shape(logits, {n}, "logits");
    require_shape(ids, {n}, "ids");
    require(n > 0, "logits must not be empty");
    require(temperature > 0, "temperature must be positive");
    if (token_map) require_shape(*token_map, {n}, "token_map");
    return machine.kernels.race_candidates_row(logits.data(), static_cast<int>(n), temperature, draw,
                                               token_map ? token_map->data() : nullptr, ids.mutable_data());
}

// The softmax of each row at one index; temperatures: [num_rows], 0 counts as 1.
void probabilities(Machine& machine, const Array<float>& logits, const Array<int64_t>& indices,
                   const Array<float>& temperatures, Array<float>& to) {
    const int num_rows = static_cast<int>(axis_size(logits, 0)), n = static_cast<int>(axis_size(logits, 1));
    require_shape(logits, {num_rows, n}, "logits");
    require_shape(indices, {num_rows}, "indices");
    require_shape(temperatures, {num_rows}, "temperatures");
    require_shape(to, {num_rows}, "to");
    const float *rows = logits.data(), *heat = temperatures.data();
    const int64_t* chosen = indices.data();
    float* out = to.mutable_data();
    for (int row = 0; row < num_rows; ++row) {
        require(0 <= chosen[row] && chosen[row] < n, "there are " + std::to_string(n) + " logits, and no " +
                                                         std::to_string(chosen[row]));
    }
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(num_rows, [&](int row) {
            const float* x = rows + static_cast<size_t>(row) * n;
            const int32_t likeliest = kernels->argmax_row(x, n);
            out[row] = likeliest < 0 ? NAN
                                     : kernels->probability_row(x, n, static_cast<int32_t>(chosen[row]), x[likeliest],
                                                                heat[row]);
        });
    });
}

}  // namespace

void bind_attention(py::module_& module, py::class_<Machine, std::shared_ptr<Machine>>& machine);
void bind_ceilings(py::module_& module);
void bind_decoder(py::module_& module);
void bind_draft(py::module_& module);
void bind_weights(py::module_& module);

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native kernels of Outrider for CPUs; see outrider.kernels.cpu.operations.";
    module.def("instruction_sets", &instruction_sets, "Those this build has and this CPU can run, best first.");
    module.def("selected_instruction_set", &selected_instruction_set,
               "The best, or what the environment variable OUTRIDER_CPU_ISA names.");
    module.def(
        "advise_huge_pages", [](uintptr_t address, size_t num_bytes) {
            advise_huge_pages(reinterpret_cast<void*>(address), num_bytes);
        },
        py::arg("address"), py::arg("num_bytes"));

    py::class_<Machine, std::shared_ptr<Machine>> machine(module, "Machine");
    machine.def(py::init<int, const std::string&>(), py::arg("num_threads"), py::arg("instruction_set"))
        .def_property_readonly("num_threads", [](const Machine& machine) { return machine.pool.num_threads(); })
        .def_property_readonly("instruction_set",
                               [](const Machine& machine) { return machine.kernels.instruction_set; })
        .def("linear", &linear, py::arg("x").noconvert(), py::arg("packed").none(false), py::arg("to").noconvert())
        .def("rms_norm", &rms_norm, py::arg("x").noconvert(), py::arg("weight").noconvert(), py::arg("eps"),
             py::arg("to").noconvert())
        .def("rotary", &rotary, py::arg("x").noconvert(), py::arg("cos").noconvert(), py::arg("sin").noconvert())
        .def("silu_mul", &silu_mul, py::arg("gate_up").noconvert(), py::arg("to").noconvert())
        .def("argmax", &argmax, py::arg("logits").noconvert(), py::arg("to").noconvert())
        .def("top_k", &top_k, py::arg("logits").noconvert(), py::arg("values").noconvert(), py::arg("ids").noconvert())
        .def("race_candidates", &race_candidates, py::arg("logits").noconvert(), py::arg("temperature"),
             py::arg("draw"), py::arg("ids").noconvert(), py::arg("token_map").noconvert() = py::none())
        .def("probabilities", &probabilities, py::arg("logits").noconvert(), py::arg("indices").noconvert(),
             py::arg("temperatures").noconvert(), py::arg("to").noconvert());

    bind_weights(module);
    bind_attention(module, machine);
    bind_decoder(module);
    bind_draft(module);
    bind_ceilings(module);
}

}  // namespace outrider
