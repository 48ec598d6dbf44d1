#define OUTRIDER_ISA_AVX512
#include "kernel_table.h"
