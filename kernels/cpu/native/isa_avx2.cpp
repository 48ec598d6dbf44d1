#define OUTRIDER_ISA_AVX2
#include "kernel_table.h"
