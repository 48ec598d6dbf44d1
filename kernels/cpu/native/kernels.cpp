#include "kernels.h"

#include <cstdlib>
#include <stdexcept>

namespace outrider {

namespace scalar {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kKernels;
}
#endif

namespace {


std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // No processor has AVX2 and lacks F16C; older compilers do not know that name here.
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni")) {
        found.push_back(&avx512::kKernels);
    }
    if (has_avx2) found.push_back(&avx2::kKernels);
#elif defined(__aarch64__)
    found.push_back(&neon::kKernels);
#endif
    found.push_back(&scalar::kKernels);
    return found;
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable()) names.push_back(kernels->instruction_set);
    return names;
}

std::string selected_instruction_set() {
    const char* wanted = std::getenv("OUTRIDER_CPU_ISA");
    const bool is_set = wanted != nullptr && *wanted != '\0';
    return is_set ? kernels_for(wanted).instruction_set : usable().front()->instruction_set;
}

const Kernels& kernels_for(const std::string& instruction_set) {
    std::string known;
    for (const Kernels* kernels : usable()) {
        if (kernels->instruction_set == instruction_set) return *kernels;
        known += (known.empty() ? "" : ", ") + std::string(kernels->instruction_set);
    }
    throw std::invalid_argument("this CPU and build have no instruction set \"" + instruction_set + "\"; use one of " +
                                known);
}

}  // namespace outrider
