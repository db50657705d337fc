/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies: pages that the slab's donor lacks are brought there, from the backup, so that reading
 * them no longer takes the disk, or, of a slab that migrates, from its other place (a pull). Two
 * stages:
 *
 *   reading   The entry is marked `copying` and has no version staged, so a read still goes where
 *             it went, and a write or zeroing that comes begins version 1 and is not held up.
 *   writing   Bytes that are right, of a page that nobody has written, become its staged version 0
 *             and are sent as any write is: what comes now waits for the end of that (R3), and
 *             write_done() finds the copy outdated.
 *
 * No use of where they go is held in the first stage: a donor that wants its memory back does not
 * wait for our disk, or another donor. The word, compared at its end, says whether it is the same
 * mapping still.
 *
 * In a slab that is pulled, each copy that has ended begins the next, so no timer sets the pace and
 * no more than the copies' share is ever under way. All of them take their groups from one counter.
 */
#include <errno.h>

#include "engine/ops/ops.h"
#include "engine/state/seal.h"

/* Consecutive pages of one group, and so of one shard and one stripe. */
struct claimed_run {
	uint64_t page;
	uint32_t wanted; /* could be copied; of these the first `pages` have got a buffer */
	uint32_t pages;
	uint32_t slot;
};

/* Where copies come from: a place of the slab, or */
#define BACKUP 2u
/* Copies that isw_slab_pull begins at once; each begins the next. */
#define PULLS 8u
/* Groups without a page to copy that one look passes over. */
#define PULL_LOOKS_MAX 512u

/* Under the shard lock: it is there, the donor lacks it, and nobody is at it. */
static bool lacking(struct isw_engine *e, uint64_t page, uint32_t from)
{
	bool there = iswi_bit(e->remote_valid, page);

	there = from == BACKUP ? !there && iswi_bit(e->backup_current, page)
			       : there && iswi_place_at(e, page) == from;
	return there && !iswi_entry_find(e, page);
}

/* Claims the first run of pages to copy in [page, stop), all of one group. */
static struct claimed_run claim(struct isw_engine *e, uint32_t from, uint64_t page, uint64_t stop,
				uint32_t pages_max)
{
	struct iswi_shard *shard = iswi_shard_of(e, page);
	uint64_t group = page / ISWI_GROUP_PAGES;
	struct claimed_run run = {0};
	uint32_t valid;

	pthread_mutex_lock(&shard->lock);
	/* In a slab that is filled already most groups are such. */
	valid = iswi_kept32(&e->remote_valid[group]);
	if (from == BACKUP ? !(iswi_kept32(&e->backup_current[group]) & ~valid) : !valid)
		page = stop;
	while (page < stop && !lacking(e, page, from))
		page++;
	run.page = page;
	while (run.wanted < pages_max && page < stop && lacking(e, page, from)) {
		run.wanted++;
		page++;
	}
	if (run.wanted)
		run.pages = iswi_staging_take_spare(e, run.wanted, ISWI_COPY_PAGES_MAX, &run.slot);
	for (uint32_t i = 0; i < run.pages; i++)
		iswi_entry_make(e, run.page + i)->copying = true;
	pthread_mutex_unlock(&shard->lock);
	iswi_count(&e->count.copies_begun, run.pages);
	return run;
}

static void pull_read_done(struct iswi_xfer *xfer, int error);
static void fill_read_done(struct iswi_op *op, int error);

/* Begins to read what was claimed; of a place the caller holds a use. */
static void read_run(struct isw_engine *e, const struct claimed_run *run, uint32_t from,
		     const struct iswi_use *to)
{
	struct iswi_op *op = iswi_op_take(e);

	op->copy = true;
	op->page = run->page;
	op->pages = run->pages;
	op->slab = (uint32_t)(run->page / e->slab_pages);
	op->word = to->word;
	op->slot = run->slot;
	op->xfer.buf = e->staging + (uint64_t)run->slot * ISW_PAGE_BYTES;
	if (from == BACKUP) {
		op->done = fill_read_done;
		iswi_backup_read(e, op);
		return;
	}
	op->pull = true;
	op->place = (uint8_t)from;
	op->xfer.kind = ISWI_XFER_READ;
	op->xfer.done = pull_read_done;
	iswi_place_get_more(e, op->slab, from);
	iswi_remote_submit(e, op);
}

/* A use of the slab's current place, if it is this mapping. */
static bool get_current(struct isw_engine *e, uint32_t slab, uint64_t generation,
			struct iswi_use *use_out)
{
	if (!iswi_slab_get(e, slab, use_out))
		return false;
	if (iswi_kept64(&iswi_place(e, slab, use_out->place)->generation) == generation)
		return true;
	iswi_place_put(e, slab, use_out->place);
	return false;
}

int isw_slab_fill(isw_engine *e, uint32_t slab, uint64_t generation, uint32_t first,
		  uint32_t pages_max, uint32_t *next_out)
{
	uint64_t start = slab * e->slab_pages, page, end;
	struct iswi_use to;
	uint32_t begun = 0;

	if (slab >= e->slabs_count)
		return -EINVAL;
	if (!get_current(e, slab, generation, &to))
		return -ESTALE;
	end = ISWI_MIN(start + e->slab_pages, e->pages);
	page = e->has_backup ? ISWI_MIN(start + first, end) : end;
	pages_max = ISWI_MIN(pages_max, ISWI_COPY_PAGES_MAX);
	while (page < end && begun < pages_max) {
		struct claimed_run run =
			claim(e, BACKUP, page, iswi_group_end(page, end), pages_max - begun);

		page = run.page + run.pages;
		begun += run.pages;
		if (run.pages)
			read_run(e, &run, BACKUP, &to);
		else if (run.wanted)
			break; /* copies have their share of the buffers */
	}
	iswi_place_put(e, slab, to.place);
	*next_out = (uint32_t)(page == end ? e->slab_pages : page - start);
	return (int)begun;
}

/*
 * Under the shard lock: is what was read still the page? Wrong bytes are only counted here: a
 * read, which looks a second time, judges where they came from.
 */
static bool still_good(struct isw_engine *e, const struct iswi_entry *entry, bool wrong, bool pull)
{
	if (entry->version)
		return false;
	if (!wrong)
		return true;
	iswi_count(pull ? &e->count.crc_errors_remote : &e->count.crc_errors_backup, 1);
	return false;
}

/* Under the shard lock: what was read becomes the page's staged version, held by its write. */
static void stage(struct isw_engine *e, struct iswi_entry *entry, uint32_t slot,
		  const struct iswi_seal *seal)
{
	struct iswi_slot_use *use = &e->slot_uses[slot];

	/* Without its page, so no descriptor (R10): what was copied is where it was. */
	e->slots[slot].version = 0;
	e->slots[slot].seal = *seal;
	use->req = NULL;
	use->older = ISWI_NONE; /* of version 0 there is no older one */
	use->refs = 1;
	entry->newest = slot;
	entry->remote_busy = true;
}

static void pull_written(struct iswi_op *op, int error);

/*
 * What a copy has read, or failed to, is there. Its op is given back already: there is one for each
 * buffer, no more. Returns whether anything is written now.
 */
static bool copy_on(struct isw_engine *e, const struct iswi_op *read, int error)
{
	struct iswi_op *op = NULL, *first = NULL, *last = NULL;
	struct iswi_shard *shard = iswi_shard_of(e, read->page);
	struct iswi_use to;
	struct iswi_seal seals[ISWI_GROUP_PAGES];
	uint32_t wrong = 0, given = 0;
	bool mapped;

	/* With the page's seal of now: without a version it gets no other before it is staged. */
	if (!error)
		wrong = iswi_pages_check(e, read->xfer.buf, read->page, read->pages, seals);
	/* The slab may have migrated since: then writes no longer go there (R8). */
	mapped = iswi_slab_get(e, read->slab, &to);
	pthread_mutex_lock(&shard->lock);
	for (uint32_t i = 0; i < read->pages; i++) {
		struct iswi_entry *entry = iswi_entry_find(e, read->page + i); /* copying */
		uint32_t slot = read->slot + i;

		entry->copying = false;
		if (!error && still_good(e, entry, wrong >> i & 1, read->pull) && mapped &&
		    to.word == read->word) {
			stage(e, entry, slot, &seals[i]);
			if (op) {
				op->pages++;
				continue;
			}
			op = iswi_write_op(e, read->page + i, slot, &to);
			op->copy = true;
			op->pull = read->pull;
			op->done = pull_written;
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
		iswi_place_put(e, read->slab, to.place);
	if (given)
		iswi_write_kick(e);
	return first;
}

/* Backup reader. */
static void fill_read_done(struct iswi_op *op, int error)
{
	struct iswi_op ended = *op;

	iswi_op_give(ended.engine, op);
	if (error)
		iswi_count(&ended.engine->count.backup_errors, 1);
	copy_on(ended.engine, &ended, error);
}

/* ------------------------------------------------------------------------ pulling */

static void pull_on(struct isw_engine *e);

static void pull_written(struct iswi_op *op, int error)
{
	if (!error)
		pull_on(op->engine);
}

static void pull_read_done(struct iswi_xfer *xfer, int error)
{
	struct iswi_op *op = ISWI_CONTAINER(xfer, struct iswi_op, xfer), ended = *op;
	struct isw_engine *e = ended.engine;
	bool goes_on;

	iswi_op_give(e, op);
	/* Staged before the source may be given up and its pages count as gone. */
	goes_on = copy_on(e, &ended, error);
	iswi_remote_ended(e, &ended, error);
	if (!goes_on && !error) /* a donor that refuses is not asked for all the rest */
		pull_on(e);
}

/*
 * Begins to copy what a group's pages have at the slab's source; true when that is the end of it.
 */
static bool pull_group(struct isw_engine *e, uint32_t slab, uint32_t group)
{
	uint64_t start = slab * e->slab_pages, page = start + (uint64_t)group * ISWI_GROUP_PAGES;
	uint64_t end = ISWI_MIN(start + e->slab_pages, e->pages), stop, word;
	struct iswi_use to;
	bool begun = false, ends = true;

	/* Pages of one group of the bitmaps, which a slab need not begin with. */
	page = ISWI_MAX(page / ISWI_GROUP_PAGES * ISWI_GROUP_PAGES, start);
	stop = iswi_group_end(page, end);
	if (!iswi_slab_get(e, slab, &to))
		return true;
	if (iswi_place_get(e, slab, !to.place, &word)) {
		ends = false;
		while (page < stop) {
			struct claimed_run run =
				claim(e, !to.place, page, stop, (uint32_t)(stop - page));

			page = run.page + run.pages;
			begun |= run.pages;
			if (run.pages) {
				read_run(e, &run, !to.place, &to);
			} else if (run.wanted) { /* the copies' share is used up */
				ends = true;
				break;
			}
		}
		iswi_place_put(e, slab, !to.place);
	}
	iswi_place_put(e, slab, to.place);
	return begun || ends;
}

/* The groups that a slab's pages are in, at most. */
static uint32_t groups_of(const struct isw_engine *e)
{
	return (uint32_t)((e->slab_pages + ISWI_GROUP_PAGES - 1) / ISWI_GROUP_PAGES) + 1;
}

static void pull_on(struct isw_engine *e)
{
	for (uint32_t looks = 0; looks < PULL_LOOKS_MAX; looks++) {
		uint_fast64_t next = atomic_load(&e->pull);
		uint32_t slab = (uint32_t)(next >> 32), group = (uint32_t)next;

		if (group >= groups_of(e))
			return;
		if (atomic_compare_exchange_strong(&e->pull, &next, next + 1) &&
		    pull_group(e, slab, group))
			return;
	}
}

void iswi_pull_restart(struct isw_engine *e, uint32_t slab)
{
	uint_fast64_t next = atomic_load(&e->pull);

	while (next >> 32 == slab &&
	       !atomic_compare_exchange_weak(&e->pull, &next, (uint64_t)slab << 32))
		;
}

int isw_slab_pull(isw_engine *e, uint32_t slab, uint64_t generation, uint32_t again)
{
	uint_fast64_t next = atomic_load(&e->pull);
	struct iswi_use to;
	uint64_t word;
	bool both;

	if (slab >= e->slabs_count)
		return -EINVAL;
	if (!get_current(e, slab, generation, &to))
		return -ESTALE;
	both = iswi_place_get(e, slab, !to.place, &word);
	if (both) {
		if (again || next >> 32 != slab)
			atomic_store(&e->pull, (uint64_t)slab << 32);
		for (uint32_t i = 0; i < PULLS; i++)
			pull_on(e);
		iswi_place_put(e, slab, !to.place);
	}
	iswi_place_put(e, slab, to.place);
	next = atomic_load(&e->pull);
	return both ? next >> 32 == slab && (uint32_t)next < groups_of(e) : -ESTALE;
}
