/* SPDX-License-Identifier: Apache-2.0 */
/* The cryptographic libraries of this build, and sealers of theirs. */
#ifndef ISW_TEST_SEAL_LIBRARIES_H
#define ISW_TEST_SEAL_LIBRARIES_H

#include <string.h>

#include "check.h"
#include "seal/seal.h"
#include "tests.h"

#define LIBRARIES_MAX 2u
#define KEYS          4u

UNUSED_OK static const struct iswi_seal_ops *library(uint32_t n)
{
	const struct iswi_seal_ops *const *all = iswi_seal_libraries();

	for (uint32_t i = 0; i < n; i++)
		if (all[i] == NULL)
			return NULL;
	return all[n];
}

/* A sealer with KEYS keys, the same in each library; NULL: this build lacks the library. */
UNUSED_OK static struct iswi_sealer *make_sealer(const struct iswi_seal_ops *ops)
{
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	struct iswi_sealer *sealer;

	if (ops == NULL)
		return NULL;
	CHECK_EQ(ops->make(KEYS, &sealer), 0);
	for (uint32_t number = 0; number < KEYS; number++) {
		memset(key, (int)(0xa0 + number), sizeof(key));
		ops->set_key(sealer, number, key);
	}
	return sealer;
}

UNUSED_OK static void fill(unsigned char *out, size_t bytes, uint32_t seed)
{
	for (size_t i = 0; i < bytes; i++) {
		seed = seed * 1664525u + 1013904223u;
		out[i] = (unsigned char)(seed >> 24);
	}
}

UNUSED_OK static bool all_zeros(const unsigned char *bytes, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (bytes[i] != 0)
			return false;
	return true;
}

#endif
