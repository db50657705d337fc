/* SPDX-License-Identifier: Apache-2.0 */
/* What a program did with its large memory, record by record. */
#ifndef ISW_BENCH_FAR_TRACE_H
#define ISW_BENCH_FAR_TRACE_H

#include <stdint.h>

#define KIND_SHIFT 28u
#define FIRST_MASK ((1u << KIND_SHIFT) - 1)

/*
 * A record of END ends the recording. PART_SIZE comes first: its `pages` are what the recorder sees
 * as one. WINDOW begins a window: its `pages` are milliseconds since the start. LEFT pages became
 * the kernel's. CUT says that something was not recorded.
 */
enum kind { END, WINDOW, TOUCH, TAKEN, MAPPED, FREED, DEAD, ZEROS, LEFT, PART_SIZE, CUT };

/* Pages [first, first + pages) of the arena. */
struct record {
	uint32_t kind_first, pages;
};

#endif
