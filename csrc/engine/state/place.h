/* SPDX-License-Identifier: Apache-2.0 */
/* Places of slabs: who may send there, and from when to when. */
#ifndef ISWI_STATE_PLACE_H
#define ISWI_STATE_PLACE_H

#include "engine/state/arena.h"
#include "engine/state/engine.h"

/* A use of a slab's place: its holder may send there. */
struct iswi_use {
	uint64_t word;
	uint32_t place;
};

static inline uint32_t iswi_word_state(uint64_t word)
{
	return word & 0xff;
}
static inline uint64_t iswi_word_with(uint64_t word, uint32_t state)
{
	return (word & ~0xffull) | state;
}
static inline struct iswi_place *iswi_place(const struct isw_engine *e, uint32_t slab,
					    uint32_t place)
{
	return &e->slabs[slab].places[place];
}
/*
 * Raises the place's in_flight and says whether it is MAPPED (*word_out is then its word). When it
 * is not, in_flight is lowered again. Never under a shard lock: the last put clears page bits.
 */
bool iswi_place_get(struct isw_engine *e, uint32_t slab, uint32_t place, uint64_t *word_out);
/* The same under any lock, but in_flight stays raised, also when the place is not MAPPED. */
bool iswi_place_hold(struct isw_engine *e, uint32_t slab, uint32_t place, uint64_t *word_out);
/* One more use, by a holder of one. */
void iswi_place_get_more(struct isw_engine *e, uint32_t slab, uint32_t place);
void iswi_place_put(struct isw_engine *e, uint32_t slab, uint32_t place);
/* A use of the slab's current place, where writes go; false when that is not MAPPED. */
bool iswi_slab_get(struct isw_engine *e, uint32_t slab, struct iswi_use *use_out);
/* Stores its word. Under the control lock, or by a successor. */
static inline void iswi_place_keep(struct iswi_place *p, uint64_t word)
{
	atomic_store(&p->word, word);
	iswi_crash_point();
}
/*
 * The place's last user is gone - or was, when the caller looked: since then the place may have
 * been unmapped, mapped and be draining again, with users.
 */
void iswi_place_drain(struct isw_engine *e, uint32_t slab, uint32_t place);
/* ISW_SLAB_*. */
uint32_t iswi_place_state(const struct iswi_place *p);
/* ISW_NO_REMOTE while it is UNMAPPED. */
uint32_t iswi_place_remote(const struct iswi_place *p);
/* By a successor: no use of any place is left, and none is MAPPED. */
int iswi_places_check(const struct isw_engine *e, struct isw_error *error);
void iswi_places_recover(struct isw_engine *e);
/* Every place of a remote that is down already: those MAPPED are SUSPENDED from now on. */
void iswi_places_suspend(struct isw_engine *e, uint32_t remote);

#endif
