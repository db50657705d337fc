// SPDX-License-Identifier: Apache-2.0
#include "util/util.h"

#include <time.h>

uint64_t iswi_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t monotonic_now_ns(void *ctx)
{
	(void)ctx;
	return iswi_now_ns();
}

const struct iswi_clock iswi_clock_monotonic = {.now_ns = monotonic_now_ns, .ctx = NULL};
