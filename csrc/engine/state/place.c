/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Places of slabs: where a slab is, who may send there, and from when to when.
 *
 * A place's word holds its state and the number of its mapping; in_flight counts its users. A user
 * raises the count first and looks at the word second; a thread that changes the word looks at the
 * count after it. Both are seq_cst, so one of the two sees the other, and DRAINED is reported only
 * when no user is left and none can come.
 *
 *   UNMAPPED ──map──▶ MAPPED ──remote down──▶ SUSPENDED ──resume──▶ MAPPED
 *       ▲               │ unmap                  │ unmap
 *       └── (bits) ◀─ DRAINING ◀─────────────────┘
 *
 * A slab has two places, of which one is current. Migration maps the other one and makes that
 * current (R8); the old one is a place to read and copy from until it is unmapped.
 */
#include <errno.h>

#include "engine/state/page.h"
#include "engine/state/place.h"

/* Between DRAINING and UNMAPPED: one thread clears the bits of the place's pages. */
#define SLAB_CLEARING 5u

uint32_t iswi_place_state(const struct iswi_place *p)
{
	uint32_t state = iswi_word_state(atomic_load(&p->word));

	return state == SLAB_CLEARING ? ISW_SLAB_DRAINING : state;
}

uint32_t iswi_place_remote(const struct iswi_place *p)
{
	if (iswi_place_state(p) == ISW_SLAB_UNMAPPED)
		return ISW_NO_REMOTE;
	return atomic_load_explicit(&p->remote, memory_order_relaxed);
}

/* The donor's copy is gone: nothing of this slab may be read there again. */
static void clear_remote_bits(struct isw_engine *e, uint32_t slab, uint32_t place)
{
	uint64_t page = slab * e->slab_pages;
	uint64_t end = ISWI_MIN(page + e->slab_pages, e->pages);

	while (page < end) {
		uint64_t stop = iswi_group_end(page, end);
		struct iswi_shard *shard = iswi_shard_of(e, page);

		pthread_mutex_lock(&shard->lock);
		for (; page < stop; page++) {
			if (!iswi_bit(e->remote_valid, page) || iswi_place_at(e, page) != place)
				continue;
			if (!e->has_backup)
				iswi_lost_set(e, page);
			iswi_remote_valid_clear(e, page);
		}
		pthread_mutex_unlock(&shard->lock);
	}
}

void iswi_place_drain(struct isw_engine *e, uint32_t slab, uint32_t place)
{
	struct iswi_place *p = iswi_place(e, slab, place);
	struct isw_event event = {.kind = ISW_EVENT_SLAB_DRAINED, .slab = slab};
	uint_fast64_t word;

	for (;;) {
		word = atomic_load(&p->word);
		if (iswi_word_state(word) != ISW_SLAB_DRAINING ||
		    !atomic_compare_exchange_strong(&p->word, &word,
						    iswi_word_with(word, SLAB_CLEARING)))
			return; /* another thread does it */
		if (!atomic_load(&p->in_flight))
			break;
		atomic_store(&p->word, word);
		if (atomic_load(&p->in_flight))
			return; /* the last of them does it */
	}
	iswi_crash_point();
	clear_remote_bits(e, slab, place);
	/* Before UNMAPPED, after which it may be another mapping's. */
	event.generation = iswi_kept64(&p->generation);
	event.remote = atomic_load_explicit(&p->remote, memory_order_relaxed);
	iswi_place_keep(p, iswi_word_with(word, ISW_SLAB_UNMAPPED));
	iswi_events_put(&e->events, &event);
}

bool iswi_place_hold(struct isw_engine *e, uint32_t slab, uint32_t place, uint64_t *word_out)
{
	struct iswi_place *p = iswi_place(e, slab, place);

	atomic_fetch_add(&p->in_flight, 1);
	*word_out = atomic_load(&p->word);
	return iswi_word_state(*word_out) == ISW_SLAB_MAPPED;
}

bool iswi_place_get(struct isw_engine *e, uint32_t slab, uint32_t place, uint64_t *word_out)
{
	/* A look before the count keeps places without a donor free of shared writes. */
	if (iswi_word_state(atomic_load(&iswi_place(e, slab, place)->word)) != ISW_SLAB_MAPPED)
		return false;
	if (iswi_place_hold(e, slab, place, word_out))
		return true;
	iswi_place_put(e, slab, place);
	return false;
}

void iswi_place_get_more(struct isw_engine *e, uint32_t slab, uint32_t place)
{
	atomic_fetch_add(&iswi_place(e, slab, place)->in_flight, 1);
}

void iswi_place_put(struct isw_engine *e, uint32_t slab, uint32_t place)
{
	struct iswi_place *p = iswi_place(e, slab, place);

	if (atomic_fetch_sub(&p->in_flight, 1) == 1 &&
	    iswi_word_state(atomic_load(&p->word)) == ISW_SLAB_DRAINING)
		iswi_place_drain(e, slab, place);
}

bool iswi_slab_get(struct isw_engine *e, uint32_t slab, struct iswi_use *use_out)
{
	const atomic_uint *current = &e->slabs[slab].current;

	/*
	 * Current first, in_flight second, current again; a migration changes current first and
	 * looks at in_flight second. So when it saw none, no later write goes to the old place.
	 */
	for (;;) {
		bool mapped;

		use_out->place = atomic_load(current);
		mapped = iswi_place_get(e, slab, use_out->place, &use_out->word);
		if (atomic_load(current) == use_out->place)
			return mapped;
		if (mapped)
			iswi_place_put(e, slab, use_out->place);
	}
}

int iswi_places_check(const struct isw_engine *e, struct isw_error *error)
{
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++) {
		const struct iswi_place *p = iswi_place(e, i / 2, i % 2);
		uint32_t state = iswi_word_state(iswi_kept64(&p->word));
		uint32_t current = iswi_kept32(&e->slabs[i / 2].current);

		if (current > 1 || state > SLAB_CLEARING || state == SLAB_CLEARING - 1 ||
		    (state != ISW_SLAB_UNMAPPED &&
		     iswi_kept32(&p->remote) >= e->config.remotes_max))
			return iswi_error(error, -EBADMSG,
					  "the state file is damaged: slab %u is in state %u at "
					  "donor %u; nothing was changed",
					  i / 2, state, iswi_kept32(&p->remote));
	}
	return 0;
}

void iswi_places_recover(struct isw_engine *e)
{
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++) {
		struct iswi_place *p = iswi_place(e, i / 2, i % 2);
		uint64_t word = iswi_kept64(&p->word);

		atomic_store(&p->in_flight, 0);
		atomic_store_explicit(&p->reported, 0, memory_order_relaxed);
		e->mappings = ISWI_MAX(e->mappings, word >> 8);
		if (iswi_word_state(word) == ISW_SLAB_MAPPED)
			iswi_place_keep(p, iswi_word_with(word, ISW_SLAB_SUSPENDED));
		if (iswi_word_state(word) == SLAB_CLEARING) /* once more, from its beginning */
			iswi_place_keep(p, iswi_word_with(word, ISW_SLAB_DRAINING));
	}
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++)
		iswi_place_drain(e, i / 2, i % 2); /* those DRAINING */
}

void iswi_places_suspend(struct isw_engine *e, uint32_t remote)
{
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++) {
		struct iswi_place *p = iswi_place(e, i / 2, i % 2);
		uint_fast64_t word = atomic_load(&p->word);

		if (iswi_word_state(word) == ISW_SLAB_MAPPED &&
		    atomic_load_explicit(&p->remote, memory_order_relaxed) == remote)
			atomic_compare_exchange_strong(&p->word, &word,
						       iswi_word_with(word, ISW_SLAB_SUSPENDED));
	}
}
