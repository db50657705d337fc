/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs: where they are, who may send there, and from when to when.
 *
 * A place's word holds its state and the number of its mapping; in_flight counts its users. A user
 * raises the count first and looks at the word second; whoever changes the word looks at the
 * count after it. Both are seq_cst, so one of the two sees the other, and DRAINED is reported
 * only when no user is left and none can come.
 *
 *   UNMAPPED ──map──▶ MAPPED ──remote down──▶ SUSPENDED ──resume──▶ MAPPED
 *       ▲               │ unmap                  │ unmap
 *       └── (bits) ◀─ DRAINING ◀─────────────────┘
 *
 * A slab has two places, of which one is current. Migration maps the other one and makes that
 * current (R8); the old one is a place to read and copy from until it is unmapped.
 */
#include <errno.h>

#include "engine/internal.h"

/* Between DRAINING and UNMAPPED: one thread clears the bits of the place's pages. */
#define SLAB_CLEARING 5u

static uint64_t with_state(uint64_t word, uint32_t state)
{
	return (word & ~0xffull) | state;
}

static void keep_word(struct iswi_place *p, uint64_t word)
{
	atomic_store(&p->word, word);
	iswi_crash_point();
}

static uint32_t place_state(const struct iswi_place *p)
{
	uint32_t state = iswi_word_state(atomic_load(&p->word));

	return state == SLAB_CLEARING ? ISW_SLAB_DRAINING : state;
}

uint32_t iswi_place_remote(const struct iswi_place *p)
{
	if (place_state(p) == ISW_SLAB_UNMAPPED)
		return ISW_NO_REMOTE;
	return atomic_load_explicit(&p->remote, memory_order_relaxed);
}

/* The donor's copy is gone: nothing of this slab may be read there again. */
static void clear_remote_bits(struct isw_engine *e, uint32_t slab, uint32_t place)
{
	uint64_t page = slab * e->slab_pages;
	uint64_t end = ISWI_MIN(page + e->slab_pages, e->pages);

	while (page < end) {
		uint64_t stop = (page / ISWI_GROUP_PAGES + 1) * ISWI_GROUP_PAGES;
		struct iswi_shard *shard = iswi_shard_of(e, page);

		pthread_mutex_lock(&shard->lock);
		for (; page < ISWI_MIN(stop, end); page++) {
			if (!iswi_bit(e->remote_valid, page) || iswi_place_at(e, page) != place)
				continue;
			if (!e->has_backup)
				iswi_lost_set(e, page);
			iswi_remote_valid_clear(e, page);
		}
		pthread_mutex_unlock(&shard->lock);
	}
}

/*
 * The place's last user is gone - or was, when the caller looked: since then the place may have
 * been unmapped, mapped and be draining again, with users.
 */
static void finish_drain(struct isw_engine *e, uint32_t slab, uint32_t place)
{
	struct iswi_place *p = iswi_place(e, slab, place);
	struct isw_event event = {.kind = ISW_EVENT_SLAB_DRAINED, .slab = slab};
	uint_fast64_t word;

	for (;;) {
		word = atomic_load(&p->word);
		if (iswi_word_state(word) != ISW_SLAB_DRAINING ||
		    !atomic_compare_exchange_strong(&p->word, &word,
						    with_state(word, SLAB_CLEARING)))
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
	keep_word(p, with_state(word, ISW_SLAB_UNMAPPED));
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
		finish_drain(e, slab, place);
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

/* After a place became MAPPED: its remote may have gone down just before (see fence). */
static void suspend_if_down(struct isw_engine *e, struct iswi_place *p)
{
	uint_fast64_t word = atomic_load(&p->word);
	uint32_t remote = atomic_load_explicit(&p->remote, memory_order_relaxed);

	if (iswi_word_state(word) == ISW_SLAB_MAPPED &&
	    atomic_load(&e->remotes[remote].state) != ISWI_REMOTE_UP)
		atomic_compare_exchange_strong(&p->word, &word,
					       with_state(word, ISW_SLAB_SUSPENDED));
}

/* Under the control lock: a place that is UNMAPPED becomes the donor's slot. */
static int map_place(struct isw_engine *e, struct iswi_place *p, uint32_t remote, uint32_t slot,
		     uint64_t generation)
{
	if (e->standby || iswi_word_state(atomic_load(&p->word)) != ISW_SLAB_UNMAPPED)
		return -EBUSY;
	if (atomic_load(&e->remotes[remote].state) != ISWI_REMOTE_UP)
		return -ENOTCONN;
	iswi_keep64(&p->generation, generation);
	iswi_keep32(&p->remote, remote);
	iswi_keep32(&p->slot, slot);
	atomic_store_explicit(&p->reported, 0, memory_order_relaxed);
	keep_word(p, ++e->mappings << 8 | ISW_SLAB_MAPPED); /* after its names: R12 */
	suspend_if_down(e, p);
	return 0;
}

int isw_slab_map(isw_engine *e, uint32_t slab, uint32_t remote, uint32_t slot, uint64_t generation)
{
	int code;

	if (slab >= e->slabs_count || remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control);
	code = map_place(e, iswi_place(e, slab, atomic_load(&e->slabs[slab].current)), remote, slot,
			 generation);
	if (!code)
		iswi_pull_anew(e, slab);
	pthread_mutex_unlock(&e->control);
	if (!code)
		iswi_write_stranded(e, slab);
	return code;
}

int isw_slab_migrate(isw_engine *e, uint32_t slab, uint32_t remote, uint32_t slot,
		     uint64_t generation)
{
	uint32_t current, state;
	int code;

	if (slab >= e->slabs_count || remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control);
	current = atomic_load(&e->slabs[slab].current);
	state = iswi_word_state(atomic_load(&iswi_place(e, slab, current)->word));
	if (state != ISW_SLAB_MAPPED && state != ISW_SLAB_SUSPENDED)
		code = -EINVAL;
	else
		code = map_place(e, iswi_place(e, slab, !current), remote, slot, generation);
	if (!code) {
		atomic_store(&e->slabs[slab].current, !current);
		iswi_crash_point();
		iswi_pull_anew(e, slab);
	}
	pthread_mutex_unlock(&e->control);
	if (!code)
		iswi_write_stranded(e, slab);
	return code;
}

/* Under the control lock, which keeps it what it is: the slab's place with this mapping, or NULL.
 */
static struct iswi_place *find_place(struct isw_engine *e, uint32_t slab, uint32_t remote,
				     uint64_t generation, uint32_t *place_out)
{
	uint32_t current = atomic_load(&e->slabs[slab].current);

	/* A place that was given up keeps its name; the slab may have come back to that donor. */
	for (uint32_t i = 0; i < 4; i++) {
		struct iswi_place *p = iswi_place(e, slab, current ^ (i & 1));
		bool unmapped = iswi_word_state(atomic_load(&p->word)) == ISW_SLAB_UNMAPPED;

		if (unmapped != i / 2 || iswi_kept64(&p->generation) != generation ||
		    atomic_load_explicit(&p->remote, memory_order_relaxed) != remote)
			continue;
		*place_out = current ^ (i & 1);
		return p;
	}
	return NULL;
}

int isw_slab_unmap(isw_engine *e, uint32_t slab, uint32_t remote, uint64_t generation)
{
	struct iswi_place *p;
	uint32_t place = 0;
	uint_fast64_t word;
	int code;

	if (slab >= e->slabs_count || remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control);
	p = find_place(e, slab, remote, generation, &place);
	code = p ? 0 : -ESTALE;
	if (p)
		word = atomic_load(&p->word);
	while (!code) {
		uint32_t state = iswi_word_state(word);

		if (state != ISW_SLAB_MAPPED && state != ISW_SLAB_SUSPENDED)
			code = -EINVAL;
		else if (atomic_compare_exchange_weak(&p->word, &word,
						      with_state(word, ISW_SLAB_DRAINING)))
			break;
	}
	pthread_mutex_unlock(&e->control);
	iswi_crash_point();
	if (!code && !atomic_load(&p->in_flight))
		finish_drain(e, slab, place);
	return code;
}

int isw_slab_resume(isw_engine *e, uint32_t slab, uint32_t remote, uint64_t generation)
{
	struct iswi_place *p;
	uint32_t place;
	uint_fast64_t word;
	int code = 0;

	if (slab >= e->slabs_count || remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control);
	p = find_place(e, slab, remote, generation, &place);
	if (!p)
		code = -ESTALE;
	else if (iswi_word_state(word = atomic_load(&p->word)) != ISW_SLAB_SUSPENDED)
		code = -EINVAL;
	else if (atomic_load(&e->remotes[remote].state) != ISWI_REMOTE_UP)
		code = -ENOTCONN;
	else
		keep_word(p, with_state(word, ISW_SLAB_MAPPED));
	if (!code)
		suspend_if_down(e, p);
	pthread_mutex_unlock(&e->control);
	if (!code)
		iswi_write_stranded(e, slab);
	return code;
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
			keep_word(p, with_state(word, ISW_SLAB_SUSPENDED));
		if (iswi_word_state(word) == SLAB_CLEARING) /* once more, from its beginning */
			keep_word(p, with_state(word, ISW_SLAB_DRAINING));
	}
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++)
		finish_drain(e, i / 2, i % 2); /* those DRAINING */
}

void iswi_places_suspend(struct isw_engine *e, uint32_t remote)
{
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++) {
		struct iswi_place *p = iswi_place(e, i / 2, i % 2);
		uint_fast64_t word = atomic_load(&p->word);

		if (iswi_word_state(word) == ISW_SLAB_MAPPED &&
		    atomic_load_explicit(&p->remote, memory_order_relaxed) == remote)
			atomic_compare_exchange_strong(&p->word, &word,
						       with_state(word, ISW_SLAB_SUSPENDED));
	}
}

int isw_slab_pages_at(isw_engine *e, uint32_t slab, uint32_t remote, uint64_t generation,
		      uint32_t *pages_out)
{
	uint64_t page, end;
	uint32_t place = 0, pages = 0;
	struct iswi_place *p;
	bool in_use = false;

	if (slab >= e->slabs_count || remote >= e->config.remotes_max)
		return -EINVAL;
	pthread_mutex_lock(&e->control);
	p = find_place(e, slab, remote, generation, &place);
	if (p && iswi_word_state(atomic_load(&p->word)) == ISW_SLAB_UNMAPPED)
		p = NULL;
	if (p)
		in_use =
			atomic_load(&p->in_flight) || atomic_load(&e->slabs[slab].current) == place;
	pthread_mutex_unlock(&e->control);
	if (!p)
		return -ESTALE;
	page = slab * e->slab_pages;
	end = ISWI_MIN(page + e->slab_pages, e->pages);
	while (page < end) {
		uint64_t stop = ISWI_MIN((page / ISWI_GROUP_PAGES + 1) * ISWI_GROUP_PAGES, end);
		struct iswi_shard *shard = iswi_shard_of(e, page);

		pthread_mutex_lock(&shard->lock);
		for (; page < stop; page++)
			pages += iswi_bit(e->remote_valid, page) && iswi_place_at(e, page) == place;
		pthread_mutex_unlock(&shard->lock);
	}
	*pages_out = pages;
	return in_use;
}

int isw_engine_slabs(isw_engine *e, uint32_t first, uint32_t max, struct isw_slab_info *slabs_out)
{
	uint32_t n = 0;

	pthread_mutex_lock(&e->control);
	for (uint32_t i = first; i < e->slabs_count && n < max; i++, n++) {
		struct iswi_slab *s = &e->slabs[i];
		uint32_t current = atomic_load(&s->current);
		struct iswi_place *p = &s->places[current], *source = &s->places[!current];

		slabs_out[n] = (struct isw_slab_info){
			.state = place_state(p),
			.remote = iswi_place_remote(p),
			.slot = atomic_load_explicit(&p->slot, memory_order_relaxed),
			.in_flight = (uint32_t)atomic_load(&p->in_flight),
			.generation = iswi_kept64(&p->generation),
			.source_state = place_state(source),
			.source_remote = iswi_place_remote(source),
			.source_slot = atomic_load_explicit(&source->slot, memory_order_relaxed),
			.source_in_flight = (uint32_t)atomic_load(&source->in_flight),
			.source_generation = iswi_kept64(&source->generation),
			.page_ins = iswi_counted(&s->page_ins),
			.page_outs = iswi_counted(&s->page_outs),
			.remote_valid_pages = iswi_counted(&s->remote_valid_pages),
		};
	}
	pthread_mutex_unlock(&e->control);
	return (int)n;
}
