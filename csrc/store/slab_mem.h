/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a slab's bytes lie: anonymous private memory, or a file of a tmpfs that outlives the
 * process (slab_dir.h). The only place that knows.
 */
#ifndef ISWI_SLAB_MEM_H
#define ISWI_SLAB_MEM_H

#include <stdbool.h>
#include <stdint.h>

struct iswi_slab_mem {
	void *base; /* NULL: none */
	uint64_t bytes;
	bool pinned; /* false: mlock was refused, the host may swap it out */
};

/*
 * Blocks while the host finds the memory: zeroed, present, and pinned where that is allowed. fd: an
 * empty file of that size, or -1 for anonymous memory; it is not needed afterwards.
 */
int iswi_slab_mem_make(struct iswi_slab_mem *mem, int fd, uint64_t bytes);
/* A predecessor's slab, with its contents; not pinned. */
int iswi_slab_mem_open(struct iswi_slab_mem *mem, int fd, uint64_t bytes);
/* Blocks. false: refused. */
bool iswi_slab_mem_pin(const struct iswi_slab_mem *mem);
/* Blocks: overwrites all of it with zeros. */
void iswi_slab_mem_zero(struct iswi_slab_mem *mem);
/* Gives the memory back to the host, or to the file that keeps it. */
void iswi_slab_mem_free(struct iswi_slab_mem *mem);

#endif
