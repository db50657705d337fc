/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's memory, made once at start: staging buffers, entries, ops. */
#ifndef ISWI_STATE_MEMORY_H
#define ISWI_STATE_MEMORY_H

#include "engine/state/op.h"

/* remote_bytes: of each remote. Call destroy after an error, too. */
int iswi_memory_create(struct isw_engine *e, size_t remote_bytes, struct isw_error *error);
void iswi_memory_destroy(struct isw_engine *e);
/*
 * Up to `want` consecutive free buffers; returns how many (0: none), the first in *slot_out. far:
 * of those that far memory may have.
 */
uint32_t iswi_staging_take(struct isw_engine *e, uint32_t want, bool far, uint32_t *slot_out);
/*
 * The same for a copy: none when copies have spare_max already, and only so many that at least half
 * of all stay free.
 */
uint32_t iswi_staging_take_spare(struct isw_engine *e, uint32_t want, uint32_t spare_max,
				 uint32_t *slot_out);
void iswi_staging_give(struct isw_engine *e, uint32_t slot);
/* Takes this free buffer, for a caller that found it in use in the arena; far: for far memory. */
void iswi_staging_claim(struct isw_engine *e, uint32_t slot, bool far);
/* How many are in use, and how many of these by copies, which are dispensable. */
void iswi_staging_count(struct isw_engine *e, uint32_t *used_out, uint32_t *copies_out);
struct iswi_op *iswi_op_take(struct isw_engine *e);
void iswi_op_give(struct isw_engine *e, struct iswi_op *op);

#endif
