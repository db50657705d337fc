/* SPDX-License-Identifier: Apache-2.0 */
/* State of single pages: the sharded in-flight table and the page bits. */
#include "engine/state/page.h"
#include "engine/state/ahead.h"
#include "engine/state/memory.h"

static uint32_t *bucket_of(struct isw_engine *e, uint64_t page)
{
	uint64_t key =
		page % ISWI_GROUP_PAGES + page / ISWI_GROUP_PAGES / ISWI_SHARDS * ISWI_GROUP_PAGES;

	return &iswi_shard_of(e, page)->hash[key % ISWI_HASH_PER_SHARD];
}

struct iswi_entry *iswi_entry_find(struct isw_engine *e, uint64_t page)
{
	if (!iswi_shard_of(e, page)->entries)
		return NULL;
	for (uint32_t i = *bucket_of(e, page); i != ISWI_NONE; i = e->entries[i].hash_next)
		if (e->entries[i].page == page)
			return &e->entries[i];
	return NULL;
}

struct iswi_entry *iswi_entry_make(struct isw_engine *e, uint64_t page)
{
	struct iswi_entry *entry = iswi_entry_find(e, page);
	uint32_t *bucket = bucket_of(e, page), index;

	if (entry)
		return entry;
	/* There is one: an entry is made with a staging buffer in hand and lives with one. */
	pthread_mutex_lock(&e->entries_lock);
	index = e->entries_free;
	entry = &e->entries[index];
	e->entries_free = entry->hash_next;
	pthread_mutex_unlock(&e->entries_lock);
	*entry = (struct iswi_entry){
		.page = page,
		.hash_next = *bucket,
		.newest = ISWI_NONE,
		.backup_prev = ISWI_NONE,
		.backup_next = ISWI_NONE,
	};
	*bucket = index;
	iswi_shard_of(e, page)->entries++;
	return entry;
}

static void entry_free(struct isw_engine *e, struct iswi_entry *entry)
{
	uint32_t index = (uint32_t)(entry - e->entries), *link = bucket_of(e, entry->page);

	while (*link != index)
		link = &e->entries[*link].hash_next;
	*link = entry->hash_next;
	iswi_shard_of(e, entry->page)->entries--;
	pthread_mutex_lock(&e->entries_lock);
	entry->hash_next = e->entries_free;
	e->entries_free = index;
	pthread_mutex_unlock(&e->entries_lock);
}

uint32_t iswi_entry_newest(const struct isw_engine *e, const struct iswi_entry *entry)
{
	if (entry->newest == ISWI_NONE || e->slots[entry->newest].version != entry->version)
		return ISWI_NONE;
	return entry->newest;
}

void iswi_entry_safe(struct isw_engine *e, struct iswi_entry *entry, uint32_t version,
		     struct iswi_req **done_list)
{
	for (uint32_t i = entry->newest; i != ISWI_NONE; i = e->slot_uses[i].older) {
		struct iswi_req *req = e->slot_uses[i].req;

		if (!req || iswi_is_newer(e->slots[i].version, version))
			continue;
		e->slot_uses[i].req = NULL;
		/*
		 * acq_rel: the thread that finishes the request sees what each page's thread wrote.
		 */
		if (atomic_fetch_sub_explicit(&req->pending, 1, memory_order_acq_rel) == 1) {
			req->next = *done_list;
			*done_list = req;
		}
	}
}

/* R1: may the newest version of the page leave staging? */
static bool safe_elsewhere(const struct isw_engine *e, uint64_t page)
{
	return iswi_bit(e->backup_current, page) ||
	       (!e->has_backup && iswi_bit(e->remote_valid, page));
}

uint32_t iswi_entry_collect(struct isw_engine *e, struct iswi_entry *entry)
{
	uint32_t *link = &entry->newest, given = 0, free_slots = ISWI_NONE;
	uint32_t newest = iswi_entry_newest(e, entry);

	while (*link != ISWI_NONE) {
		uint32_t i = *link;
		struct iswi_slot_use *use = &e->slot_uses[i];

		if (use->refs || use->req || (i == newest && !safe_elsewhere(e, entry->page))) {
			link = &use->older;
			continue;
		}
		*link = use->older;
		use->older = free_slots;
		free_slots = i;
		iswi_slot_clear(e, i);
		given++;
	}
	/* The entry first: the taker of the last free buffer must find an entry for it. */
	if (entry->newest == ISWI_NONE && !entry->remote_busy && !entry->copying &&
	    entry->backup_state == ISWI_B_IDLE)
		entry_free(e, entry);
	while (free_slots != ISWI_NONE) {
		uint32_t i = free_slots;

		free_slots = e->slot_uses[i].older;
		iswi_staging_give(e, i);
	}
	return given;
}

void iswi_remote_valid_set(struct isw_engine *e, uint64_t page, uint32_t place)
{
	/* In this order: see R11. */
	if (iswi_place_at(e, page) != place) {
		if (place)
			iswi_bit_set(e->at_place, page);
		else
			iswi_bit_clear(e->at_place, page);
	}
	if (!iswi_bit(e->remote_valid, page)) {
		iswi_bit_set(e->remote_valid, page);
		iswi_count(&e->slabs[page / e->slab_pages].remote_valid_pages, 1);
	}
	/* A copy of it was under way while its old place was given up. */
	if (!e->has_backup)
		iswi_backup_current_clear(e, page);
}

void iswi_remote_valid_clear(struct isw_engine *e, uint64_t page)
{
	if (!iswi_bit(e->remote_valid, page))
		return;
	iswi_ahead_drop(e, page);
	iswi_bit_clear(e->remote_valid, page);
	atomic_fetch_sub_explicit(&e->slabs[page / e->slab_pages].remote_valid_pages, 1,
				  memory_order_relaxed);
}
