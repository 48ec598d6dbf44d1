#define OUTRIDER_ISA_SCALAR
#include "kernel_table.h"
