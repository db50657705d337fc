/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a slab's bytes lie: anonymous private memory. The only place that knows; slabs kept in
 * files, to survive a restart of the daemon, would change this and nothing else.
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

/* Blocks while the host finds the memory: zeroed, present, and pinned where that is allowed. */
int iswi_slab_mem_make(struct iswi_slab_mem *mem, uint64_t bytes);
/* Blocks: overwrites all of it with zeros. */
void iswi_slab_mem_zero(struct iswi_slab_mem *mem);
/* Gives it back to the host. */
void iswi_slab_mem_free(struct iswi_slab_mem *mem);

#endif
