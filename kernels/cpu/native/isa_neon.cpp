#define OUTRIDER_ISA_NEON
#include "kernel_table.h"
