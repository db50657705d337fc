/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TRIM and WRITE_ZEROES: a page with neither bit and nothing staged reads as zeros, so both are a
 * new version without bytes. It goes through the same table as a write: it supersedes what is
 * staged, and whatever older write is still in flight finds its version outdated when it ends.
 */
#include "engine/ops/ops.h"

static uint32_t zero_page(struct isw_engine *e, uint64_t page, struct iswi_req **done_list)
{
	struct iswi_entry *entry = iswi_entry_find(e, page);

	iswi_remote_valid_clear(e, page);
	iswi_backup_current_clear(e, page);
	if (!entry)
		return 0;
	entry->version = iswi_version_after(entry->version);
	/* Before the answer, however long a transfer holds the buffer (R10). */
	if (entry->newest != ISWI_NONE)
		iswi_slot_clear(e, entry->newest);
	entry->remote_wanted = false;
	iswi_backup_cancel(e, entry);
	/* Older writes are over: what they wrote may no longer be read. */
	iswi_entry_safe(e, entry, entry->version, done_list);
	return iswi_entry_collect(e, entry);
}

void iswi_zero(struct isw_engine *e, struct iswi_req *req)
{
	uint64_t page = req->offset / ISW_PAGE_BYTES;
	uint64_t end = page + req->length / ISW_PAGE_BYTES;
	struct iswi_req *done_list = NULL;
	uint32_t given = 0;

	while (page < end) {
		uint64_t group = page / ISWI_GROUP_PAGES;
		uint64_t stop = iswi_group_end(page, end);
		struct iswi_shard *shard = iswi_shard_of(e, page);

		pthread_mutex_lock(&shard->lock);
		if (!shard->entries && !iswi_kept32(&e->remote_valid[group]) &&
		    !iswi_kept32(&e->backup_current[group]))
			page = stop; /* a large TRIM passes mostly over pages that are zeros */
		for (; page < stop; page++)
			given += zero_page(e, page, &done_list);
		pthread_mutex_unlock(&shard->lock);
	}
	iswi_req_finish_list(e, done_list);
	if (given)
		iswi_write_kick(e);
	iswi_req_put(e, req);
}
