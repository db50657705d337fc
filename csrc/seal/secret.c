// SPDX-License-Identifier: Apache-2.0
/* Memory that holds keys, and comparing and forgetting without a trace. */
#include "seal/seal.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

int iswi_seal_memory_make(size_t bytes, void **memory_out)
{
	void *memory =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int code;

	if (memory == MAP_FAILED)
		return -errno;
	if (madvise(memory, bytes, MADV_DONTDUMP) != 0 ||
	    madvise(memory, bytes, MADV_DONTFORK) != 0) {
		code = -errno;
		munmap(memory, bytes);
		return code;
	}
	(void)mlock(memory, bytes);
	*memory_out = memory;
	return 0;
}

void iswi_seal_memory_end(void *memory, size_t bytes)
{
	iswi_seal_forget(memory, bytes);
	munmap(memory, bytes);
}

bool iswi_seal_tags_equal(const unsigned char *a, const unsigned char *b)
{
	unsigned int differences = 0;

	for (size_t i = 0; i < ISWI_SEAL_TAG_BYTES; i++)
		differences |= (unsigned int)(a[i] ^ b[i]);
	/* Hides the value from the compiler, which may not end the loop early then. */
	__asm__ volatile("" : "+r"(differences));
	return differences == 0;
}

void iswi_seal_forget(void *secret, size_t bytes)
{
	explicit_bzero(secret, bytes);
}
