// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE 1
#include "store/slab_mem.h"

#include <errno.h>
#include <fcntl.h>
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

static int map(int fd, uint64_t bytes, char **base_out)
{
	char *base = NULL;
	int err = reserve(bytes, &base);

	if (err != 0)
		return err;
	/* Put into the place reserved for it, which is aligned. */
	if (fd >= 0 && mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
			       MAP_FAILED) {
		err = -errno;
		munmap(base, bytes);
		return err;
	}
	/* Advice only: fewer TLB misses, and a forked child would double what is pinned. */
	madvise(base, bytes, MADV_HUGEPAGE);
	madvise(base, bytes, MADV_DONTFORK);
	*base_out = base;
	return 0;
}

/* Makes every page present: a full file system fails here, not with a signal later. */
static int populate(char *base, int fd, uint64_t bytes)
{
	if (madvise(base, bytes, MADV_POPULATE_WRITE) == 0)
		return 0;
	if (errno != EINVAL) /* EINVAL: the kernel does not know the advice */
		return errno == EFAULT ? -ENOMEM : -errno;
	if (fd >= 0)
		return -posix_fallocate(fd, 0, (off_t)bytes);
	memset(base, 0, bytes);
	return 0;
}

int iswi_slab_mem_make(struct iswi_slab_mem *mem, int fd, uint64_t bytes)
{
	char *base = NULL;
	int err = map(fd, bytes, &base);

	if (err != 0)
		return err;
	*mem = (struct iswi_slab_mem){.base = base, .bytes = bytes};
	/* Pinning also makes anonymous pages present; no file system can be full here. */
	if (fd < 0)
		mem->pinned = iswi_slab_mem_pin(mem);
	if (mem->pinned)
		return 0;
	err = populate(base, fd, bytes);
	if (err != 0) {
		iswi_slab_mem_free(mem);
		return err;
	}
	mem->pinned = fd >= 0 && iswi_slab_mem_pin(mem);
	return 0;
}

int iswi_slab_mem_open(struct iswi_slab_mem *mem, int fd, uint64_t bytes)
{
	char *base = NULL;
	int err = map(fd, bytes, &base);

	if (err == 0)
		*mem = (struct iswi_slab_mem){.base = base, .bytes = bytes};
	return err;
}

bool iswi_slab_mem_pin(const struct iswi_slab_mem *mem)
{
	return mlock(mem->base, mem->bytes) == 0;
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
