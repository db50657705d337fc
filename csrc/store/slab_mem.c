// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE 1
#include "store/slab_mem.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_BYTES (2u << 20)

/* Linux 5.14; older headers lack it. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Address space of `bytes`, aligned for huge pages where the slab is large enough for one. */
static int reserve(uint64_t bytes, char **base_out)
{
	uint64_t slack = bytes >= HUGE_BYTES ? HUGE_BYTES : 0, before;
	char *mapping;

	mapping = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mapping == MAP_FAILED)
		return -errno;
	before = slack == 0 ? 0 : -(uintptr_t)mapping & (HUGE_BYTES - 1);
	if (before > 0)
		munmap(mapping, before);
	if (slack > before)
		munmap(mapping + before + bytes, slack - before);
	*base_out = mapping + before;
	return 0;
}

int iswi_slab_mem_make(struct iswi_slab_mem *mem, uint64_t bytes)
{
	char *base = NULL;
	int err = reserve(bytes, &base);

	if (err != 0)
		return err;
	/* Advice only: fewer TLB misses, and a forked child would double what is pinned. */
	madvise(base, bytes, MADV_HUGEPAGE);
	madvise(base, bytes, MADV_DONTFORK);
	mem->pinned = mlock(base, bytes) == 0;
	if (!mem->pinned && madvise(base, bytes, MADV_POPULATE_WRITE) != 0) {
		err = -errno;
		if (err != -EINVAL) { /* EINVAL: the kernel does not know the advice */
			munmap(base, bytes);
			return err;
		}
		memset(base, 0, bytes);
	}
	mem->base = base;
	mem->bytes = bytes;
	return 0;
}

void iswi_slab_mem_zero(struct iswi_slab_mem *mem)
{
	memset(mem->base, 0, mem->bytes);
}

void iswi_slab_mem_free(struct iswi_slab_mem *mem)
{
	munmap(mem->base, mem->bytes);
	memset(mem, 0, sizeof(*mem));
}
