// What `outrider bench kernels` needs of the module, beside the operations.
#include "ceilings.h"
#include "checks.h"
#include "machine.h"

namespace outrider {
namespace {

constexpr py::ssize_t kReadUnit = 1024;

void read(Machine& machine, const Array<uint8_t>& data) {
    require(data.size() % kReadUnit == 0, "the size of data must be a multiple of " + std::to_string(kReadUnit));
    const py::gil_scoped_release release;
    read_memory(machine, data.data(), static_cast<size_t>(data.size()));
}

template <int64_t (*kMultiply)(Machine&, int64_t)>
int64_t multiply(Machine& machine, int64_t num_steps) {
    require(num_steps > 0, "num_steps must be positive, not " + std::to_string(num_steps));
    const py::gil_scoped_release release;
    return kMultiply(machine, num_steps);
}

}  // namespace

void bind_ceilings(py::module_& module) {
    module.def("read_memory", &read, py::arg("machine"), py::arg("data").noconvert(),
               "Reads all of it once, on all threads.");
    module.def("multiply_int8", &multiply<multiply_int8>, py::arg("machine"), py::arg("num_steps"),
               "Multiplies int8 in registers, on all threads; returns how many multiply-adds were done.");
    module.def("multiply_f32", &multiply<multiply_f32>, py::arg("machine"), py::arg("num_steps"),
               "The same with floats.");
}

}  // namespace outrider
