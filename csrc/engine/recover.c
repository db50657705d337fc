/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over: what a killed process left in the arena becomes this engine's state.
 *
 * Nothing is stored before everything was looked at. After that each store leaves what a take-over
 * understands, so a process killed in the middle of this is followed by one that does the rest:
 * losing descriptors are cleared while the winning one stands, a page's bits and seal are made
 * to fit its descriptor while that stands, places are made SUSPENDED or drained as ever.
 *
 * What is staged is the newest (R9), wherever the page may be valid by its bits: nobody can tell
 * which version those bits are of. So it is staged as if it had just been written.
 */
#include <errno.h>
#include <string.h>

#include "engine/backup/backup.h"
#include "engine/engine.h"
#include "engine/remote/remote.h"
#include "engine/state/memory.h"
#include "engine/state/seal.h"
#include "seal/seal.h"

static int check_slots(const struct isw_engine *e, struct isw_error *error)
{
	for (uint32_t i = 0; i < e->config.staging_pages; i++) {
		uint64_t page = iswi_kept64(&e->slots[i].page);

		if (page != ISWI_NO_PAGE && page >= e->pages)
			return iswi_error(error, -EBADMSG,
					  "the state file is damaged: staging buffer %u is of page "
					  "%llu, the device has %llu; nothing was changed",
					  i, (unsigned long long)page,
					  (unsigned long long)e->pages);
	}
	return 0;
}

/* Each page's newest descriptor gets an entry, the others are cleared. */
static void find_newest(struct isw_engine *e)
{
	for (uint32_t i = 0; i < e->config.staging_pages; i++) {
		uint64_t page = iswi_kept64(&e->slots[i].page);
		uint32_t loser = ISWI_NONE;
		struct iswi_entry *entry;

		if (page == ISWI_NO_PAGE)
			continue;
		entry = iswi_entry_make(e, page);
		if (entry->newest != ISWI_NONE &&
		    !iswi_is_newer(e->slots[i].version, entry->version)) {
			loser = i;
		} else {
			loser = entry->newest;
			entry->newest = i;
			entry->version = e->slots[i].version;
		}
		if (loser != ISWI_NONE)
			iswi_slot_clear(e, loser);
	}
}

/*
 * Bytes that are not what was written: no copy of the page is right, but perhaps the backup's, if
 * it has this version already. Its seal will tell, and else reading it is an error.
 */
static void give_up_damaged(struct isw_engine *e, uint32_t slot)
{
	uint64_t page = iswi_kept64(&e->slots[slot].page);

	iswi_seal_keep(e, page, &e->slots[slot].seal);
	iswi_backup_current_set(e, page);
	if (iswi_bit(e->remote_valid, page))
		iswi_bit_clear(e->remote_valid, page);
	iswi_entry_collect(e, iswi_entry_find(e, page));
	iswi_events_put(&e->events, &(struct isw_event){
					    .kind = ISW_EVENT_BAD_PAGE,
					    .slab = (uint32_t)(page / e->slab_pages),
					    .remote = ISW_NO_REMOTE,
					    .value = page,
				    });
}

/* All that is staged: the page is that, and nothing else. */
static void restage(struct isw_engine *e)
{
	unsigned char opened[ISW_PAGE_BYTES];

	for (uint32_t i = 0; i < e->config.staging_pages; i++) {
		uint64_t page = iswi_kept64(&e->slots[i].page);
		const unsigned char *data = e->staging + (uint64_t)i * ISW_PAGE_BYTES;

		if (page == ISWI_NO_PAGE)
			continue;
		e->slot_uses[i] = (struct iswi_slot_use){.older = ISWI_NONE};
		iswi_staging_claim(e, i, page >= iswi_engine_size_bytes(e) / ISW_PAGE_BYTES);
		if (!iswi_seal_open(e, page, &e->slots[i].seal, data, opened)) {
			give_up_damaged(e, i);
			continue;
		}
		iswi_seal_keep(e, page, &e->slots[i].seal);
		if (iswi_bit(e->remote_valid, page))
			iswi_bit_clear(e->remote_valid, page);
		iswi_backup_current_clear(e, page);
		e->stranded |= !e->has_backup;
	}
	iswi_seal_forget(opened, sizeof(opened));
}

/* Statistics begin at zero, except this one, which follows from the bits. */
static void count_valid(struct isw_engine *e)
{
	for (uint32_t slab = 0; slab < e->slabs_count; slab++) {
		struct iswi_slab *s = &e->slabs[slab];
		uint64_t page = slab * e->slab_pages, valid = 0;
		uint64_t end = ISWI_MIN(page + e->slab_pages, e->pages);

		while (page < end) {
			if (page % ISWI_GROUP_PAGES || end - page < ISWI_GROUP_PAGES) {
				valid += iswi_bit(e->remote_valid, page++);
				continue;
			}
			valid += (uint32_t)__builtin_popcount(
				iswi_kept32(&e->remote_valid[page / ISWI_GROUP_PAGES]));
			page += ISWI_GROUP_PAGES;
		}
		atomic_store_explicit(&s->remote_valid_pages, valid, memory_order_relaxed);
		atomic_store_explicit(&s->page_ins, 0, memory_order_relaxed);
		atomic_store_explicit(&s->page_outs, 0, memory_order_relaxed);
	}
}

/* A remote that somebody knows by its number is down until it is reconnected. */
static void reserve_remotes(struct isw_engine *e)
{
	for (uint32_t i = 0; i < e->config.remotes_max; i++)
		if (iswi_record_read(e, i, NULL))
			atomic_store(&e->remotes[i].state, ISWI_REMOTE_DOWN);
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++) {
		uint32_t remote = iswi_place_remote(iswi_place(e, i / 2, i % 2));

		if (remote != ISW_NO_REMOTE)
			atomic_store(&e->remotes[remote].state, ISWI_REMOTE_DOWN);
	}
}

/* Last of all: from the first page on the backup's threads are at it. */
static void queue_for_backup(struct isw_engine *e)
{
	for (uint32_t i = 0; i < e->config.staging_pages; i++) {
		uint64_t page = iswi_kept64(&e->slots[i].page);
		struct iswi_shard *shard;
		struct iswi_entry *entry;

		if (page == ISWI_NO_PAGE)
			continue;
		shard = iswi_shard_of(e, page);
		pthread_mutex_lock(&shard->lock);
		entry = iswi_entry_find(e, page); /* gone, if a writer was faster with it */
		if (entry && entry->newest == i)
			iswi_backup_enqueue(e, entry, true);
		pthread_mutex_unlock(&shard->lock);
	}
}

int iswi_recover(struct isw_engine *e, struct isw_error *error)
{
	int code = check_slots(e, error);

	if (!code)
		code = iswi_places_check(e, error);
	if (!code)
		code = iswi_seal_inherit(e, error);
	if (code)
		return code;
	find_newest(e);
	restage(e);
	count_valid(e);
	reserve_remotes(e);
	pthread_mutex_lock(&e->control);
	e->standby = false;
	iswi_places_recover(e);
	pthread_mutex_unlock(&e->control);
	if (e->has_backup)
		queue_for_backup(e);
	return 0;
}
