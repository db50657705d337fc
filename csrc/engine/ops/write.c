/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes. A request is cut at slab borders into fragments, a fragment into runs of consecutive
 * free staging buffers. Each page of a run gets a new version, both its bits are cleared, its
 * backup write is queued and, where the slab is mapped, its remote write is sent - except while
 * an older one of the same page is in flight (R3): then that one's end sends the newest.
 */
#include <errno.h>
#include <string.h>

#include "engine/ops/ops.h"
#include "engine/state/seal.h"

/* Ops of one slab that are to be sent together. */
struct batch {
	struct iswi_op *first, *last;
};

static void batch_add(struct batch *batch, struct iswi_op *op)
{
	if (batch->last)
		batch->last->xfer.next = &op->xfer;
	else
		batch->first = op;
	batch->last = op;
}

static void write_done(struct iswi_xfer *xfer, int error);

struct iswi_op *iswi_write_op(struct isw_engine *e, uint64_t page, uint32_t slot,
			      const struct iswi_use *use)
{
	struct iswi_op *op = iswi_op_take(e);

	op->page = page;
	op->pages = 1;
	op->slab = (uint32_t)(page / e->slab_pages);
	op->word = use->word;
	op->place = (uint8_t)use->place;
	op->slot = slot;
	op->xfer.kind = ISWI_XFER_WRITE;
	op->xfer.buf = e->staging + (uint64_t)slot * ISW_PAGE_BYTES;
	op->xfer.done = write_done;
	iswi_place_get_more(e, op->slab, op->place);
	return op;
}

/* Under the shard lock: the staged bytes in `slot` become the newest version of the page. */
static struct iswi_entry *stage_page(struct isw_engine *e, uint64_t page, uint32_t slot,
				     struct iswi_req *req, bool mapped)
{
	struct iswi_entry *entry = iswi_entry_make(e, page);

	entry->version = iswi_version_after(entry->version);
	e->slots[slot].version = entry->version;
	e->slot_uses[slot].req = req;
	e->slot_uses[slot].older = entry->newest;
	/* The order of R9: with this store the page is what is staged, for every reader, ... */
	iswi_keep64(&e->slots[slot].page, page);
	/* ... an older version is over, though its buffer may still be sent from (R10), ... */
	if (entry->newest != ISWI_NONE)
		iswi_slot_clear(e, entry->newest);
	entry->newest = slot;
	/* Before anything is sent: a transfer cut in its middle leaves a torn page there. */
	iswi_remote_valid_clear(e, page);
	iswi_backup_current_clear(e, page);
	/* ... and what its seal was no longer matters. */
	iswi_seal_keep(e, page, &e->slots[slot].seal);
	if (e->has_backup)
		iswi_backup_enqueue(e, entry, !mapped);
	return entry;
}

/* Stages `count` pages already sealed in consecutive slots; fills `batch` with what to send. */
static uint32_t stage_run(struct isw_engine *e, struct iswi_req *req, uint64_t page, uint32_t slot,
			  uint32_t count, const struct iswi_use *use, struct batch *batch)
{
	struct iswi_op *op = NULL;
	uint32_t given = 0;

	for (uint32_t i = 0; i < count; i++) {
		struct iswi_shard *shard = iswi_shard_of(e, page + i);
		struct iswi_entry *entry;
		bool send = false;

		pthread_mutex_lock(&shard->lock);
		entry = stage_page(e, page + i, slot + i, req, use);
		if (use && entry->remote_busy) {
			entry->remote_wanted = true;
		} else if (use) {
			send = true;
			entry->remote_busy = true;
			e->slot_uses[slot + i].refs++;
		}
		given += iswi_entry_collect(e, entry); /* a superseded version nobody needs */
		pthread_mutex_unlock(&shard->lock);

		if (!send) {
			op = NULL;
		} else if (op && (page + i) % ISWI_STRIPE_PAGES) {
			op->pages++;
		} else {
			op = iswi_write_op(e, page + i, slot + i, use);
			batch_add(batch, op);
		}
	}
	return given;
}

/* By a holder of the request's guard: what is not staged yet will not be. */
static void refuse_rest(struct iswi_req *req)
{
	uint64_t end = (req->offset + req->length) / ISW_PAGE_BYTES;

	iswi_req_fail(req, -EIO);
	atomic_fetch_sub_explicit(&req->pending, (unsigned int)(end - req->cursor),
				  memory_order_acq_rel);
	req->cursor = end;
}

/*
 * Stages as much of the request as there are buffers for; true when all of it is. Called for a
 * request by one thread at a time.
 */
static bool stage_request(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug)
{
	uint64_t first = req->offset / ISW_PAGE_BYTES;
	uint64_t end = first + req->length / ISW_PAGE_BYTES;
	uint32_t given = 0;

	while (req->cursor < end) {
		uint32_t slab = (uint32_t)(req->cursor / e->slab_pages), slot, count;
		uint64_t slab_end = (slab + 1ull) * e->slab_pages, page = req->cursor;
		struct batch batch = {0};
		struct iswi_use use;
		bool mapped = iswi_slab_get(e, slab, &use);

		if (!mapped && !e->has_backup) { /* nowhere to put it */
			refuse_rest(req);
			break;
		}
		count = iswi_staging_take(e, (uint32_t)(ISWI_MIN(end, slab_end) - page),
					  req->flags & ISWI_REQ_FAR, &slot);
		if (!count) {
			if (mapped)
				iswi_place_put(e, slab, use.place);
			break;
		}
		iswi_seal_pages(e, page, slot, count,
				(char *)req->data + (page - first) * ISW_PAGE_BYTES);
		given += stage_run(e, req, page, slot, count, mapped ? &use : NULL, &batch);
		req->cursor += count;
		iswi_count(&e->slabs[slab].page_outs, count);
		iswi_count(&e->count.pages_out, count);
		if (batch.first)
			iswi_remote_send(e, batch.first, batch.last, plug);
		if (mapped)
			iswi_place_put(e, slab, use.place);
	}
	if (given)
		iswi_write_kick(e);
	return req->cursor == end;
}

/*
 * Goes on with the first waiting write until it cannot. One thread at a time, so that writes are
 * staged in their order; a thread that comes meanwhile leaves word, and the busy one looks again.
 */
static void go_on(struct isw_engine *e, struct iswi_waiting *waiting)
{
	pthread_mutex_lock(&waiting->lock);
	waiting->again = true;
	while (!waiting->busy && waiting->again && waiting->head) {
		struct iswi_req *req = waiting->head;
		bool staged;

		waiting->busy = true;
		waiting->again = false;
		pthread_mutex_unlock(&waiting->lock);
		staged = stage_request(e, req, NULL);
		if (!staged && iswi_backup_hopeless(e)) {
			/*
			 * The backup fails for so many pages that no buffer will become free. The
			 * kernel keeps a page in memory when its swap-out fails, so an error is
			 * better than a wait without end.
			 */
			refuse_rest(req);
			staged = true;
		}
		pthread_mutex_lock(&waiting->lock);
		waiting->busy = false;
		if (!staged)
			continue;
		waiting->head = req->next;
		if (!waiting->head)
			waiting->tail = &waiting->head;
		waiting->again = true;
		pthread_mutex_unlock(&waiting->lock);
		iswi_req_put(e, req);
		pthread_mutex_lock(&waiting->lock);
	}
	pthread_mutex_unlock(&waiting->lock);
}

/* Neither kind waits behind the other: far memory fills its part of staging sooner. */
void iswi_write_kick(struct isw_engine *e)
{
	go_on(e, &e->waiting);
	if (e->config.far_bytes)
		go_on(e, &e->waiting_far);
}

void iswi_write(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug)
{
	uint32_t pages = (uint32_t)(req->length / ISW_PAGE_BYTES);
	struct iswi_waiting *waiting = req->flags & ISWI_REQ_FAR ? &e->waiting_far : &e->waiting;
	bool queue;

	req->cursor = req->offset / ISW_PAGE_BYTES;
	atomic_fetch_add_explicit(&req->pending, pages, memory_order_relaxed);
	pthread_mutex_lock(&waiting->lock);
	queue = waiting->head; /* others wait already: behind them */
	pthread_mutex_unlock(&waiting->lock);
	if (!queue && stage_request(e, req, plug)) {
		iswi_req_put(e, req);
		return;
	}
	iswi_count(&e->count.staging_waits, 1);
	pthread_mutex_lock(&waiting->lock);
	req->next = NULL;
	*waiting->tail = req;
	waiting->tail = &req->next;
	pthread_mutex_unlock(&waiting->lock);
	iswi_write_kick(e); /* a buffer may have become free in between */
}

/*
 * Under the shard lock: an op for the newest version of a page whose older write has ended. Uses
 * that are to be put when the lock is not held are counted in `owed`, by place.
 */
static struct iswi_op *resend(struct isw_engine *e, struct iswi_entry *entry, uint32_t owed[2])
{
	uint32_t slab = (uint32_t)(entry->page / e->slab_pages), slot;
	struct iswi_use use;
	bool mapped;

	entry->remote_wanted = false;
	slot = iswi_entry_newest(e, entry);
	if (slot == ISWI_NONE)
		return NULL;
	do { /* as in iswi_slab_get */
		use.place = atomic_load(&e->slabs[slab].current);
		mapped = iswi_place_hold(e, slab, use.place, &use.word);
		owed[use.place]++;
	} while (atomic_load(&e->slabs[slab].current) != use.place);
	if (!mapped)
		return NULL;
	entry->remote_busy = true;
	e->slot_uses[slot].refs++;
	return iswi_write_op(e, entry->page, slot, &use);
}

void iswi_write_stranded(struct isw_engine *e, uint32_t slab)
{
	uint64_t first = slab * e->slab_pages, end = first + e->slab_pages;

	for (uint32_t i = 0; e->stranded && i < e->config.staging_pages; i++) {
		uint64_t page = iswi_kept64(&e->slots[i].page);
		uint32_t owed[2] = {0};
		struct iswi_op *op = NULL;
		struct iswi_shard *shard;
		struct iswi_entry *entry;

		if (page < first || page >= end)
			continue;
		shard = iswi_shard_of(e, page);
		pthread_mutex_lock(&shard->lock);
		entry = iswi_entry_find(e, page);
		if (entry && !entry->remote_busy && !iswi_bit(e->remote_valid, page))
			op = resend(e, entry, owed);
		pthread_mutex_unlock(&shard->lock);
		if (op)
			iswi_remote_submit(e, op);
		for (uint32_t place = 0; place < 2; place++)
			while (owed[place]--)
				iswi_place_put(e, slab, place);
	}
}

/*
 * Is the place still the one this op went to? SUSPENDED will do: an acknowledgement that came along
 * with the break of another connection is one.
 */
static bool same_mapping(const struct isw_engine *e, const struct iswi_op *op)
{
	uint64_t word = atomic_load(&iswi_place(e, op->slab, op->place)->word);

	return word >> 8 == op->word >> 8 && (iswi_word_state(word) == ISW_SLAB_MAPPED ||
					      iswi_word_state(word) == ISW_SLAB_SUSPENDED);
}

/*
 * Under the shard lock, without a backup: when no write of the page is in flight and no donor has
 * its newest version, no event will ever come that makes it safe. It is lost with its slab.
 */
static void give_up_stranded(struct isw_engine *e, struct iswi_entry *entry,
			     struct iswi_req **done_list)
{
	if (entry->remote_busy || iswi_bit(e->remote_valid, entry->page) ||
	    iswi_entry_newest(e, entry) == ISWI_NONE)
		return;
	for (uint32_t i = entry->newest; i != ISWI_NONE; i = e->slot_uses[i].older)
		if (e->slot_uses[i].req)
			iswi_req_fail(e->slot_uses[i].req, -EIO);
	iswi_entry_safe(e, entry, entry->version, done_list);
	iswi_lost_set(e, entry->page);
}

/* Any thread: a remote write has ended. */
static void write_done(struct iswi_xfer *xfer, int error)
{
	struct iswi_op *taken = ISWI_CONTAINER(xfer, struct iswi_op, xfer), ended = *taken;
	const struct iswi_op *op = &ended;
	struct isw_engine *e = op->engine;
	const atomic_uint *current = &e->slabs[op->slab].current;
	struct iswi_req *done_list = NULL;
	struct batch again = {0};
	uint32_t given = 0, owed[2] = {0};

	/* Given back before its buffers are: there is one op for each buffer, no more. */
	iswi_op_give(e, taken);
	if (!error && !op->copy)
		iswi_count(&e->count.pages_out_remote, op->pages);
	for (uint32_t i = 0; i < op->pages; i++) {
		struct iswi_shard *shard = iswi_shard_of(e, op->page + i);
		uint32_t slot = op->slot + i;
		struct iswi_entry *entry;
		struct iswi_op *next;
		bool valid;

		pthread_mutex_lock(&shard->lock);
		entry = iswi_entry_find(e, op->page + i); /* there: it holds our slot */
		entry->remote_busy = false;
		e->slot_uses[slot].refs--;
		if (!error)
			iswi_entry_safe(e, entry, e->slots[slot].version, &done_list);
		valid = !error && entry->version == e->slots[slot].version && same_mapping(e, op);
		if (valid)
			iswi_remote_valid_set(e, op->page + i, op->place);
		if (op->copy)
			iswi_copy_count(e, op->pull, valid);
		/* What the source of a migration has not got may be had where the slab is now. */
		if (!e->has_backup && !valid && atomic_load(current) != op->place)
			entry->remote_wanted = true;
		if (entry->remote_wanted && (next = resend(e, entry, owed)))
			batch_add(&again, next);
		if (!e->has_backup)
			give_up_stranded(e, entry, &done_list);
		given += iswi_entry_collect(e, entry);
		pthread_mutex_unlock(&shard->lock);
	}
	if (again.first)
		iswi_remote_submit(e, again.first);
	for (uint32_t place = 0; place < 2; place++)
		while (owed[place]--)
			iswi_place_put(e, op->slab, place);
	iswi_remote_ended(e, op, error);
	if (error && e->has_backup)
		iswi_backup_hurry(e);
	iswi_req_finish_list(e, done_list);
	if (given)
		iswi_write_kick(e);
	if (op->pull)
		op->done(&ended, error);
}
