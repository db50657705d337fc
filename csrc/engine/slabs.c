/* SPDX-License-Identifier: Apache-2.0 */
/* Slabs, as Python orders and sees them: mapped, migrated, resumed, unmapped. See state/place.c. */
#include <errno.h>

#include "engine/ops/ops.h"

/* After a place became MAPPED: its remote may have gone down just before (see fence). */
static void suspend_if_down(struct isw_engine *e, struct iswi_place *p)
{
	uint_fast64_t word = atomic_load(&p->word);
	uint32_t remote = atomic_load_explicit(&p->remote, memory_order_relaxed);

	if (iswi_word_state(word) == ISW_SLAB_MAPPED &&
	    atomic_load(&e->remotes[remote].state) != ISWI_REMOTE_UP)
		atomic_compare_exchange_strong(&p->word, &word,
					       iswi_word_with(word, ISW_SLAB_SUSPENDED));
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
	iswi_place_keep(p, ++e->mappings << 8 | ISW_SLAB_MAPPED); /* after its names: R12 */
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
		iswi_pull_restart(e, slab);
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
		iswi_pull_restart(e, slab);
	}
	pthread_mutex_unlock(&e->control);
	if (!code)
		iswi_write_stranded(e, slab);
	return code;
}

/*
 * Under the control lock, which keeps it what it is: the slab's place with this mapping, or NULL.
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
						      iswi_word_with(word, ISW_SLAB_DRAINING)))
			break;
	}
	pthread_mutex_unlock(&e->control);
	iswi_crash_point();
	if (!code && !atomic_load(&p->in_flight))
		iswi_place_drain(e, slab, place);
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
		iswi_place_keep(p, iswi_word_with(word, ISW_SLAB_MAPPED));
	if (!code)
		suspend_if_down(e, p);
	pthread_mutex_unlock(&e->control);
	if (!code)
		iswi_write_stranded(e, slab);
	return code;
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
		uint64_t stop = iswi_group_end(page, end);
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
			.state = iswi_place_state(p),
			.remote = iswi_place_remote(p),
			.slot = atomic_load_explicit(&p->slot, memory_order_relaxed),
			.in_flight = (uint32_t)atomic_load(&p->in_flight),
			.generation = iswi_kept64(&p->generation),
			.source_state = iswi_place_state(source),
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
