// SPDX-License-Identifier: Apache-2.0
/*
 * Bucket b covers [256 · 2^(b/8) · (1 + (b%8)/8), ... (1 + (b%8 + 1)/8)) nanoseconds. What is
 * shorter than 256 ns counts in the first bucket, what is longer than 2^40 ns in the last.
 */
#include "util/util.h"

#define LOWEST_BIT  8 /* 256 ns */
#define STEP_BITS   3 /* 8 buckets per power of two */
#define BUCKET_STEP (1u << STEP_BITS)

static uint32_t bucket_of(uint64_t ns)
{
	uint32_t power, bucket;

	if (ns < (1u << LOWEST_BIT))
		return 0;
	power = 63u - (uint32_t)__builtin_clzll(ns);
	bucket = (power - LOWEST_BIT) * BUCKET_STEP +
		 (uint32_t)((ns >> (power - STEP_BITS)) & (BUCKET_STEP - 1u));
	return ISWI_MIN(bucket, ISW_LATENCY_BUCKETS - 1u);
}

void iswi_latency_add(struct iswi_latency *latency, uint64_t ns)
{
	iswi_count(&latency->bucket[bucket_of(ns)], 1);
}

uint64_t isw_latency_bucket_ns(uint32_t bucket)
{
	uint32_t power;

	if (bucket >= ISW_LATENCY_BUCKETS)
		bucket = ISW_LATENCY_BUCKETS - 1u;
	power = bucket / BUCKET_STEP + LOWEST_BIT;
	return (uint64_t)(BUCKET_STEP + bucket % BUCKET_STEP + 1u) << (power - STEP_BITS);
}
