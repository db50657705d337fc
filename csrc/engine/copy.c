/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies: pages that the backup holds and the slab's donor lacks are brought to the donor, so that
 * reading them no longer takes the disk. Two stages:
 *
 *   reading   The entry is marked `copying` and has no version staged, so a read still goes to the
 *             backup, and a write or zeroing that comes begins version 1 and is not held up.
 *   writing   Bytes that are right, of a page that nobody has written, become its staged version 0
 *             and are sent as any write is: what comes now waits for the end of that (R3), and
 *             write_done() finds the copy outdated.
 *
 * No use of the slab is held in the first stage: a donor that wants its memory back does not wait
 * for our disk. The slab's word, compared at its end, says whether it is the same mapping still.
 */
#include <errno.h>

#include "engine/internal.h"

/* Consecutive pages of one group, and so of one shard and one stripe. */
struct run {
	uint64_t page;
	uint32_t wanted; /* could be copied; of these the first `pages` have got a buffer */
	uint32_t pages;
	uint32_t slot;
};

/* Under the shard lock: the donor lacks it, the backup has it, and nobody is at it. */
static bool lacking(struct isw_engine *e, uint64_t page)
{
	return iswi_bit(e->backup_current, page) && !iswi_bit(e->remote_valid, page) &&
	       !iswi_entry_find(e, page);
}

/* Claims the first run of pages to copy in [page, stop), all of one group. */
static struct run claim(struct isw_engine *e, uint64_t page, uint64_t stop, uint32_t pages_max)
{
	struct iswi_shard *shard = iswi_shard_of(e, page);
	uint64_t group = page / ISWI_GROUP_PAGES;
	struct run run = {0};

	pthread_mutex_lock(&shard->lock);
	if (!(e->backup_current[group] & ~e->remote_valid[group]))
		page = stop; /* in a slab that is filled already most groups are such */
	while (page < stop && !lacking(e, page))
		page++;
	run.page = page;
	while (run.wanted < pages_max && page < stop && lacking(e, page)) {
		run.wanted++;
		page++;
	}
	if (run.wanted)
		run.pages = iswi_staging_take_spare(e, run.wanted, ISWI_COPY_PAGES_MAX, &run.slot);
	for (uint32_t i = 0; i < run.pages; i++)
		iswi_entry_make(e, run.page + i)->copying = true;
	pthread_mutex_unlock(&shard->lock);
	return run;
}

static void read_run(struct isw_engine *e, const struct run *run, uint64_t word)
{
	struct iswi_op *op = iswi_op_take(e);

	op->copy = true;
	op->page = run->page;
	op->pages = run->pages;
	op->slab = (uint32_t)(run->page / e->slab_pages);
	op->word = word;
	op->slot = run->slot;
	op->xfer.buf = e->staging + (uint64_t)run->slot * ISW_PAGE_BYTES;
	iswi_backup_read(e, op);
}

int isw_slab_fill(isw_engine *e, uint32_t slab, uint64_t generation, uint32_t first,
		  uint32_t pages_max, uint32_t *next_out)
{
	uint64_t start = slab * e->slab_pages, page, end, word;
	uint32_t begun = 0;

	if (slab >= e->slabs_count)
		return -EINVAL;
	if (!iswi_slab_get(e, slab, &word))
		return -ESTALE;
	if (e->slabs[slab].generation != generation) {
		iswi_slab_put(e, slab);
		return -ESTALE;
	}
	end = ISWI_MIN(start + e->slab_pages, e->pages);
	page = e->has_backup ? ISWI_MIN(start + first, end) : end;
	pages_max = ISWI_MIN(pages_max, ISWI_COPY_PAGES_MAX);
	while (page < end && begun < pages_max) {
		uint64_t group_end = (page / ISWI_GROUP_PAGES + 1) * ISWI_GROUP_PAGES;
		struct run run = claim(e, page, ISWI_MIN(group_end, end), pages_max - begun);

		page = run.page + run.pages;
		begun += run.pages;
		if (run.pages)
			read_run(e, &run, word);
		else if (run.wanted)
			break; /* copies have their share of the buffers */
	}
	iswi_slab_put(e, slab);
	*next_out = (uint32_t)(page == end ? e->slab_pages : page - start);
	return (int)begun;
}

/*
 * Under the shard lock: is what was read still the page? A wrong checksum is only counted here: a
 * read, which looks a second time, judges the backup.
 */
static bool still_good(struct isw_engine *e, const struct iswi_entry *entry, uint32_t crc)
{
	if (entry->version)
		return false;
	if (e->crc[entry->page] == crc)
		return true;
	iswi_count(&e->count.crc_errors_backup, 1);
	return false;
}

/* Under the shard lock: what was read becomes the page's staged version, held by its write. */
static void stage(struct isw_engine *e, struct iswi_entry *entry, uint32_t slot, uint32_t crc)
{
	struct iswi_slot_use *use = &e->slot_uses[slot];

	e->slots[slot] = (struct iswi_slot){.page = entry->page, .version = 0, .crc = crc};
	use->req = NULL;
	use->older = ISWI_NONE; /* of version 0 there is no older one */
	use->refs = 1;
	entry->newest = slot;
	entry->remote_busy = true;
}

/* Backup reader: what a copy has read, or failed to, is there. */
void iswi_copy_read_done(struct iswi_op *taken, int error)
{
	struct iswi_op read = *taken, *op = NULL, *first = NULL, *last = NULL;
	struct isw_engine *e = read.engine;
	struct iswi_shard *shard = iswi_shard_of(e, read.page);
	uint32_t crc[ISWI_GROUP_PAGES], given = 0;
	uint64_t word;
	bool mapped;

	/* Given back before its buffers are: there is one for each buffer, no more. */
	iswi_op_give(e, taken);
	if (error)
		iswi_count(&e->count.backup_errors, 1);
	else
		iswi_crc32c_pages(read.xfer.buf, read.pages, crc);
	mapped = iswi_slab_get(e, read.slab, &word);
	pthread_mutex_lock(&shard->lock);
	for (uint32_t i = 0; i < read.pages; i++) {
		struct iswi_entry *entry = iswi_entry_find(e, read.page + i); /* copying */
		uint32_t slot = read.slot + i;

		entry->copying = false;
		if (!error && still_good(e, entry, crc[i]) && mapped && word == read.word) {
			stage(e, entry, slot, crc[i]);
			if (op) {
				op->pages++;
				continue;
			}
			op = iswi_write_op(e, read.page + i, slot, word);
			op->copy = true;
			if (last)
				last->xfer.next = &op->xfer;
			else
				first = op;
			last = op;
		} else {
			op = NULL;
			given += 1 + iswi_entry_collect(e, entry); /* the entry first: see there */
			iswi_staging_give(e, slot);
			iswi_count(&e->count.pages_copy_dropped, 1);
		}
	}
	pthread_mutex_unlock(&shard->lock);
	if (first)
		iswi_remote_submit(e, first);
	if (mapped)
		iswi_slab_put(e, read.slab);
	if (given)
		iswi_write_kick(e);
}
