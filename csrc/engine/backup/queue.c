/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backup's queue. Pages are queued once however often they are rewritten; a writer takes the
 * oldest with its queued neighbours as one write. take and done are the whole of its logic:
 * threads call them around the blocking I/O, tests call them in any order they like.
 */
#include "engine/backup/backup.h"
#include "engine/state/finish.h"
#include "engine/state/memory.h"

#define NO_EPOCH 0xff
#define RETRY_NS 1000000000ull
/*
 * How long a page waits for neighbours to make one write with, while nobody waits for it: it is
 * staged, and on its way to a donor. Page-out at 200 MB/s fills a write of 1 MiB in that time.
 */
#define LINGER_NS 5000000ull
/* As with a donor: so many times as long as expected, but never longer than ... */
#define SLOW_FACTOR        4u
#define SLOW_MIN_TIMES_MAX 50u /* ... this multiple of hedge_us_min, or ... */
/* ... this: the use of the donor that is held meanwhile keeps an eviction waiting. */
#define SLOW_US_MAX 500000u

/* ------------------------------------------------------------ lists; backup lock */

static void list_add(struct isw_engine *e, struct iswi_entry_list *list, struct iswi_entry *entry)
{
	uint32_t index = (uint32_t)(entry - e->entries);

	entry->backup_prev = list->tail;
	entry->backup_next = ISWI_NONE;
	if (list->tail != ISWI_NONE)
		e->entries[list->tail].backup_next = index;
	else
		list->head = index;
	list->tail = index;
}

static void list_remove(struct isw_engine *e, struct iswi_entry_list *list,
			const struct iswi_entry *entry)
{
	if (entry->backup_prev != ISWI_NONE)
		e->entries[entry->backup_prev].backup_next = entry->backup_next;
	else
		list->head = entry->backup_next;
	if (entry->backup_next != ISWI_NONE)
		e->entries[entry->backup_next].backup_prev = entry->backup_prev;
	else
		list->tail = entry->backup_prev;
}

/* Whether the last backup write of the page failed and none has replaced it since. */
static void set_ailing(struct iswi_backup *b, struct iswi_entry *entry, bool ailing)
{
	if (entry->backup_ailing != ailing)
		b->ailing_count += ailing ? 1 : -1ull;
	entry->backup_ailing = ailing;
}

static uint32_t write_pages_max(const struct isw_engine *e)
{
	return ISWI_MIN(e->config.backup_write_bytes_max / ISW_PAGE_BYTES, ISWI_BACKUP_BATCH_MAX);
}

/* Never more than a part of staging: a queue that waits must not make requests wait. */
static uint32_t enough(const struct isw_engine *e)
{
	return ISWI_MIN(write_pages_max(e), ISWI_MAX(e->config.staging_pages / 4, 1u));
}

/* The pages that are queued now wait for no neighbours; those that follow do. */
static void all_due(struct iswi_backup *b)
{
	b->due_last = b->queue.tail;
}

/* A writer is woken for the first page, to watch the time, and when there is enough for a write. */
static void queue_add(struct isw_engine *e, struct iswi_entry *entry, bool hurry)
{
	struct iswi_backup *b = e->backup;

	if (b->queue.tail == b->due_last)
		b->due_ns = e->clock->now_ns(e->clock->ctx) + LINGER_NS;
	list_add(e, &b->queue, entry);
	b->queue_count++;
	if (hurry)
		all_due(b);
	if (hurry || b->queue_count == 1 || b->queue_count == enough(e))
		pthread_cond_signal(&b->write_cond);
}

static void queue_remove(struct isw_engine *e, const struct iswi_entry *entry)
{
	struct iswi_backup *b = e->backup;

	if (b->due_last == (uint32_t)(entry - e->entries))
		b->due_last = entry->backup_prev;
	list_remove(e, &b->queue, entry);
	b->queue_count--;
}

/* Somebody waits for a page of the queue, which is not empty. */
static void queue_hurry(struct iswi_backup *b)
{
	all_due(b);
	pthread_cond_signal(&b->write_cond);
}

void iswi_backup_hurry(struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;

	pthread_mutex_lock(&b->lock);
	if (b->queue.head != ISWI_NONE)
		queue_hurry(b);
	pthread_mutex_unlock(&b->lock);
}

/* A writer that leaves pages behind wakes another, to write them or to watch their time. */
static void pass_on(struct iswi_backup *b)
{
	pthread_mutex_lock(&b->lock);
	if (b->queue.head != ISWI_NONE)
		pthread_cond_signal(&b->write_cond);
	pthread_mutex_unlock(&b->lock);
}

/* ------------------------------------------------- queueing; page's shard lock held */

void iswi_backup_enqueue(struct isw_engine *e, struct iswi_entry *entry, bool hurry)
{
	struct iswi_backup *b = e->backup;

	pthread_mutex_lock(&b->lock);
	switch (entry->backup_state) {
	case ISWI_B_IDLE:
		entry->backup_state = ISWI_B_QUEUED;
		entry->flush_epoch = b->epoch;
		entry->again_epoch = NO_EPOCH;
		b->outstanding[b->epoch]++;
		queue_add(e, entry, hurry);
		break;
	case ISWI_B_BUSY:
		/* The first newer version decides which flush waits for the next write. */
		if (entry->again_epoch == NO_EPOCH)
			entry->again_epoch = b->epoch;
		break;
	default:
		if (hurry && entry->backup_state == ISWI_B_QUEUED)
			queue_hurry(b);
		iswi_count(&e->count.pages_out_superseded, 1);
	}
	pthread_mutex_unlock(&b->lock);
}

void iswi_backup_cancel(struct isw_engine *e, struct iswi_entry *entry)
{
	struct iswi_backup *b = e->backup;

	pthread_mutex_lock(&b->lock);
	if (entry->backup_state == ISWI_B_QUEUED)
		queue_remove(e, entry);
	else if (entry->backup_state == ISWI_B_FAILED)
		list_remove(e, &b->failed, entry);
	if (entry->backup_state == ISWI_B_QUEUED || entry->backup_state == ISWI_B_FAILED) {
		entry->backup_state = ISWI_B_IDLE;
		set_ailing(b, entry, false);
		iswi_flush_less(b, entry->flush_epoch);
	}
	pthread_mutex_unlock(&b->lock);
}

uint32_t iswi_backup_slow_after_us(const struct isw_engine *e, uint32_t pages)
{
	uint64_t min_us = e->config.hedge_us_min;
	uint64_t us = iswi_speed_expected_ns(&e->backup->speed, pages) * SLOW_FACTOR / 1000;

	return (uint32_t)ISWI_MIN(ISWI_MIN(ISWI_MAX(us, min_us), min_us * SLOW_MIN_TIMES_MAX),
				  SLOW_US_MAX);
}

/* Under the backup lock. */
static void slow_add(struct iswi_backup *b, struct iswi_op *op)
{
	op->slow_next = b->slow_head;
	b->slow_head = op;
	if (iswi_backup_slow_ns(op) < b->slow_watch_ns)
		pthread_cond_signal(&b->slow_cond);
}

/* Under the backup lock; false: it is not there. */
static bool slow_remove(struct iswi_backup *b, const struct iswi_op *op)
{
	struct iswi_op **at = &b->slow_head;

	while (*at && *at != op)
		at = &(*at)->slow_next;
	if (!*at)
		return false;
	*at = op->slow_next;
	return true;
}

bool iswi_backup_slow(struct isw_engine *e, uint64_t now_ns)
{
	struct iswi_backup *b = e->backup;
	struct iswi_op *op;
	uint8_t load = 0;
	uint64_t submitted_ns = 0;

	pthread_mutex_lock(&b->lock);
	for (op = b->slow_head; op && iswi_backup_slow_ns(op) > now_ns; op = op->slow_next)
		;
	if (op) {
		slow_remove(b, op);
		op->slow = true;
		op->owed = iswi_speed_is_late(&b->speed, op->load, op->xfer.slow_us * 1000ull);
		if (op->owed)
			atomic_fetch_add_explicit(&b->slow_count, 1, memory_order_relaxed);
		load = op->load;
		submitted_ns = op->xfer.submitted_ns;
	}
	pthread_mutex_unlock(&b->lock);
	if (!op)
		return false;
	iswi_speed_unanswered(&b->speed, load, e->clock->now_ns(e->clock->ctx) - submitted_ns);
	op->xfer.slow(&op->xfer, 0);
	return true;
}

void iswi_backup_read(struct isw_engine *e, struct iswi_op *op)
{
	struct iswi_backup *b = e->backup;
	struct iswi_op ***tail = op->copy ? &b->copy_tail : &b->read_tail;

	if (!op->copy) {
		op->xfer.submitted_ns = e->clock->now_ns(e->clock->ctx);
		op->load = iswi_speed_begin(&b->speed, op->pages);
	}
	op->next = NULL;
	pthread_mutex_lock(&b->lock);
	**tail = op;
	*tail = &op->next;
	if (op->xfer.slow_us)
		slow_add(b, op);
	pthread_cond_signal(&b->read_cond);
	pthread_mutex_unlock(&b->lock);
}

/* ------------------------------------------------------------------------- take */

/* Makes the page's queued write ours: its newest slot, or ISWI_NONE when none is queued. */
static uint32_t claim(struct isw_engine *e, uint64_t page)
{
	struct iswi_shard *shard = iswi_shard_of(e, page);
	struct iswi_entry *entry;
	uint32_t slot = ISWI_NONE;

	pthread_mutex_lock(&shard->lock);
	entry = iswi_entry_find(e, page);
	if (entry && entry->backup_state == ISWI_B_QUEUED) {
		pthread_mutex_lock(&e->backup->lock);
		queue_remove(e, entry);
		entry->backup_state = ISWI_B_BUSY;
		pthread_mutex_unlock(&e->backup->lock);
		slot = iswi_entry_newest(e, entry); /* QUEUED has one: zeroing cancels */
		e->slot_uses[slot].refs++;
	}
	pthread_mutex_unlock(&shard->lock);
	return slot;
}

/* Adds the queued neighbours of the claimed page, as far as one write may reach. */
static void extend(struct isw_engine *e, struct iswi_job *job, uint32_t first_slot)
{
	uint32_t max = write_pages_max(e);
	uint32_t at = ISWI_BACKUP_BATCH_MAX, slot = first_slot;

	/* Backwards into the end of the array, then moved to its front. */
	do {
		job->slots[--at] = slot;
		job->pages++;
		if (job->pages == max || !job->page)
			break;
		slot = claim(e, job->page - 1);
		if (slot != ISWI_NONE)
			job->page--;
	} while (slot != ISWI_NONE);
	for (uint32_t i = 0; i < job->pages; i++)
		job->slots[i] = job->slots[at + i];
	while (job->pages < max && job->page + job->pages < e->pages) {
		slot = claim(e, job->page + job->pages);
		if (slot == ISWI_NONE)
			break;
		job->slots[job->pages++] = slot;
	}
}

static bool take_read(struct isw_engine *e, struct iswi_job *job)
{
	struct iswi_backup *b = e->backup;
	struct iswi_op *op;

	pthread_mutex_lock(&b->lock);
	op = b->read_head;
	if (op) {
		b->read_head = op->next;
		if (!b->read_head)
			b->read_tail = &b->read_head;
	} else if (iswi_backup_may_copy(b)) {
		op = b->copy_head;
		b->copy_busy = true;
		b->copy_head = op->next;
		if (!b->copy_head)
			b->copy_tail = &b->copy_head;
	}
	pthread_mutex_unlock(&b->lock);
	if (!op)
		return false;
	job->kind = ISWI_JOB_READ;
	job->op = op;
	return true;
}

bool iswi_backup_due(const struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;

	if (b->queue.tail != b->due_last && e->clock->now_ns(e->clock->ctx) >= b->due_ns)
		all_due(b);
	if (b->queue.head == ISWI_NONE)
		return false;
	return b->stop || b->due_last != ISWI_NONE || b->flush_state != ISWI_FLUSH_IDLE ||
	       b->queue_count >= enough(e);
}

bool iswi_backup_take(struct isw_engine *e, bool reads, struct iswi_job *job)
{
	struct iswi_backup *b = e->backup;

	if (reads)
		return take_read(e, job);
	for (;;) {
		uint32_t slot;

		pthread_mutex_lock(&b->lock);
		if (b->flush_state == ISWI_FLUSH_READY) {
			b->flush_state = ISWI_FLUSH_SYNC;
			pthread_mutex_unlock(&b->lock);
			job->kind = ISWI_JOB_SYNC;
			return true;
		}
		if (b->queue.head == ISWI_NONE) {
			pthread_mutex_unlock(&b->lock);
			return false;
		}
		job->page = e->entries[b->queue.head].page;
		pthread_mutex_unlock(&b->lock);

		slot = claim(e, job->page);
		if (slot == ISWI_NONE)
			continue; /* another writer was faster */
		job->kind = ISWI_JOB_WRITE;
		job->pages = 0;
		extend(e, job, slot);
		pass_on(b);
		return true;
	}
}

/* ------------------------------------------------------------------------- done */

/* Under the shard lock: the page's write has ended; what becomes of it? */
static void page_written(struct isw_engine *e, struct iswi_entry *entry, uint32_t version,
			 int error)
{
	struct iswi_backup *b = e->backup;
	bool newest_staged = iswi_entry_newest(e, entry) != ISWI_NONE;

	if (!error && newest_staged && entry->version == version)
		iswi_backup_current_set(e, entry->page);
	pthread_mutex_lock(&b->lock);
	set_ailing(b, entry, error && newest_staged);
	if (!newest_staged || (!error && entry->version == version)) {
		entry->backup_state = ISWI_B_IDLE;
		iswi_flush_less(b, entry->flush_epoch);
	} else if (error) {
		entry->backup_state = ISWI_B_FAILED;
		list_add(e, &b->failed, entry);
	} else {
		uint8_t old = entry->flush_epoch;

		entry->backup_state = ISWI_B_QUEUED;
		entry->flush_epoch = entry->again_epoch;
		entry->again_epoch = NO_EPOCH;
		b->outstanding[entry->flush_epoch]++;
		iswi_flush_less(b, old);
		queue_add(e, entry, true);
	}
	pthread_mutex_unlock(&b->lock);
}

/* Raises or clears the alarm after a write; returns the flushes that must not wait for it. */
static struct iswi_req *judge(struct isw_engine *e, int error)
{
	struct iswi_backup *b = e->backup;
	struct isw_event event = {.code = error};
	struct iswi_req *flushes = NULL;

	pthread_mutex_lock(&b->lock);
	if (error) {
		if (!b->alarm)
			event.kind = ISW_EVENT_BACKUP_FAILING;
		b->alarm = true;
		b->retry_ns = e->clock->now_ns(e->clock->ctx) + RETRY_NS;
		flushes = iswi_flush_give_up(b);
	} else if (b->alarm && !b->ailing_count) {
		b->alarm = false;
		event.kind = ISW_EVENT_BACKUP_RECOVERED;
	}
	pthread_mutex_unlock(&b->lock);
	if (event.kind)
		iswi_events_put(&e->events, &event);
	return flushes;
}

static void write_done(struct isw_engine *e, struct iswi_job *job, int error)
{
	struct iswi_req *done_list = NULL;
	uint32_t given = 0;

	iswi_count(error ? &e->count.backup_errors : &e->count.backup_write_requests, 1);
	if (!error)
		iswi_count(&e->count.pages_out_backup, job->pages);
	for (uint32_t i = 0; i < job->pages; i++) {
		struct iswi_shard *shard = iswi_shard_of(e, job->page + i);
		uint32_t slot = job->slots[i];
		struct iswi_entry *entry;

		pthread_mutex_lock(&shard->lock);
		entry = iswi_entry_find(e, job->page + i); /* there: it holds our slot */
		e->slot_uses[slot].refs--;
		if (!error)
			iswi_entry_safe(e, entry, e->slots[slot].version, &done_list);
		page_written(e, entry, e->slots[slot].version, error);
		given += iswi_entry_collect(e, entry);
		pthread_mutex_unlock(&shard->lock);
	}
	iswi_req_fail_list(e, judge(e, error));
	iswi_req_finish_list(e, done_list);
	if (given || error)
		e->go_on(e);
}

/* A read for a request has ended. */
static void note_read(struct isw_engine *e, const struct iswi_op *op, int error)
{
	struct iswi_backup *b = e->backup;
	struct iswi_speed *speed = &b->speed;
	uint64_t now_ns = e->clock->now_ns(e->clock->ctx);

	if (op->xfer.slow_us) {
		pthread_mutex_lock(&b->lock);
		if (!slow_remove(b, op) && op->owed)
			atomic_fetch_sub_explicit(&b->slow_count, 1, memory_order_relaxed);
		pthread_mutex_unlock(&b->lock);
	}
	iswi_speed_end(speed, op->pages);
	if (error)
		iswi_speed_failed(speed, now_ns - op->xfer.submitted_ns);
	else
		iswi_speed_took(speed, op->load, now_ns - op->xfer.submitted_ns);
	if (op->measured_ns)
		iswi_speed_measured(speed, op->measured_ns, now_ns);
}

static void read_done(struct isw_engine *e, struct iswi_op *op, int error)
{
	struct iswi_backup *b = e->backup;
	bool copy = op->copy;

	if (!copy)
		note_read(e, op, error);
	op->done(op, error);
	if (!copy)
		return;
	pthread_mutex_lock(&b->lock);
	b->copy_busy = false;
	if (b->copy_head)
		pthread_cond_signal(&b->read_cond);
	pthread_mutex_unlock(&b->lock);
}

void iswi_backup_done(struct isw_engine *e, struct iswi_job *job, int error)
{
	switch (job->kind) {
	case ISWI_JOB_WRITE:
		write_done(e, job, error);
		break;
	case ISWI_JOB_SYNC:
		iswi_flush_synced(e, error);
		break;
	case ISWI_JOB_READ:
		read_done(e, job->op, error);
		break;
	}
}

bool iswi_backup_retry(struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;
	uint64_t retry_ns;
	bool any;

	pthread_mutex_lock(&b->lock);
	retry_ns = b->retry_ns;
	pthread_mutex_unlock(&b->lock);
	/* State changes want the shard lock, which comes before ours: page by page. */
	for (any = false;; any = true) {
		struct iswi_shard *shard;
		struct iswi_entry *entry;
		uint64_t page = 0;
		bool last;

		pthread_mutex_lock(&b->lock);
		/* Another write has failed by now: the next try is a while later. */
		last = b->failed.head == ISWI_NONE || b->retry_ns != retry_ns;
		if (!last)
			page = e->entries[b->failed.head].page;
		pthread_mutex_unlock(&b->lock);
		if (last)
			return any;
		shard = iswi_shard_of(e, page);
		pthread_mutex_lock(&shard->lock);
		entry = iswi_entry_find(e, page);
		if (entry && entry->backup_state == ISWI_B_FAILED) {
			pthread_mutex_lock(&b->lock);
			list_remove(e, &b->failed, entry);
			entry->backup_state = ISWI_B_QUEUED;
			entry->again_epoch = NO_EPOCH;
			queue_add(e, entry, true);
			pthread_mutex_unlock(&b->lock);
		}
		pthread_mutex_unlock(&shard->lock);
	}
}

bool iswi_backup_hopeless(struct isw_engine *e)
{
	uint32_t used, copies;
	bool hopeless;

	/* Pages of a retry under way count: with a disk that fails slowly it takes minutes. */
	hopeless = atomic_load_explicit(&e->backup->ailing_count, memory_order_relaxed) >
		   e->config.staging_pages / 2;
	/* What copies have comes back soon, and the last of them kicks. */
	iswi_staging_count(e, &used, &copies);
	return hopeless && !copies;
}
