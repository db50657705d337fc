/* SPDX-License-Identifier: Apache-2.0 */
/* The backup's threads: each takes a job, does it, and reports it. */
#include <stdio.h>
#include <sys/uio.h>
#include <time.h>

#include "engine/backup/backup.h"

void iswi_backup_init(struct iswi_backup *b)
{
	pthread_condattr_t attr;

	pthread_mutex_init(&b->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&b->write_cond, &attr);
	pthread_cond_init(&b->read_cond, &attr);
	pthread_cond_init(&b->slow_cond, &attr);
	b->slow_watch_ns = UINT64_MAX;
	pthread_condattr_destroy(&attr);
	b->queue = b->failed = (struct iswi_entry_list){ISWI_NONE, ISWI_NONE};
	b->due_last = ISWI_NONE;
	b->read_tail = &b->read_head;
	b->copy_tail = &b->copy_head;
}

static bool retry_due(struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;

	return b->failed.head != ISWI_NONE && e->clock->now_ns(e->clock->ctx) >= b->retry_ns;
}

/* Under the lock: until the condition, or until then. */
static void wait_until(struct iswi_backup *b, pthread_cond_t *cond, uint64_t until_ns)
{
	struct timespec until = {
		.tv_sec = (time_t)(until_ns / 1000000000ull),
		.tv_nsec = (long)(until_ns % 1000000000ull),
	};

	if (until_ns == UINT64_MAX)
		pthread_cond_wait(cond, &b->lock);
	else
		pthread_cond_timedwait(cond, &b->lock, &until);
}

/* Until something may have changed, or it is time for what waits. */
static void wait_for_write(struct iswi_backup *b)
{
	uint64_t until_ns = UINT64_MAX;

	if (b->failed.head != ISWI_NONE)
		until_ns = b->retry_ns;
	if (b->queue.head != ISWI_NONE)
		until_ns = ISWI_MIN(until_ns, b->due_ns);
	wait_until(b, &b->write_cond, until_ns);
}

/* Waits for work; false: stop, and nothing is queued. */
static bool wait_writer(struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;
	bool retry, go;

	pthread_mutex_lock(&b->lock);
	/* Looked at before the queue, which may never be empty on a busy device. */
	while (!(retry = retry_due(e)) && !iswi_backup_due(e) && !b->stop &&
	       b->flush_state != ISWI_FLUSH_READY)
		wait_for_write(b);
	go = !b->stop || b->queue.head != ISWI_NONE;
	pthread_mutex_unlock(&b->lock);
	if (go && retry)
		iswi_backup_retry(e);
	return go;
}

static bool wait_reader(struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;
	bool go;

	pthread_mutex_lock(&b->lock);
	while (!b->stop && !b->read_head && !iswi_backup_may_copy(b))
		pthread_cond_wait(&b->read_cond, &b->lock);
	go = !b->stop;
	pthread_mutex_unlock(&b->lock);
	return go;
}

/* own: the reader's memory, for what has no other. */
static int run_job(struct isw_engine *e, struct iswi_job *job, void *own)
{
	const struct iswi_backup *b = e->backup;
	struct iovec iov[ISWI_BACKUP_BATCH_MAX];

	switch (job->kind) {
	case ISWI_JOB_SYNC:
		return b->ops->sync(b->ctx);
	case ISWI_JOB_READ:
		if (!job->op->xfer.buf)
			job->op->xfer.buf = own;
		return b->ops->read(b->ctx, job->op->xfer.buf, job->op->pages * ISW_PAGE_BYTES,
				    job->op->page * ISW_PAGE_BYTES);
	case ISWI_JOB_WRITE:
		break;
	}
	for (uint32_t i = 0; i < job->pages; i++)
		iov[i] = (struct iovec){
			.iov_base = e->staging + (uint64_t)job->slots[i] * ISW_PAGE_BYTES,
			.iov_len = ISW_PAGE_BYTES,
		};
	return b->ops->write(b->ctx, iov, (int)job->pages, job->page * ISW_PAGE_BYTES);
}

/* Does the job, measures it and reports it. (A simulated step takes no time.) */
static void work(struct isw_engine *e, struct iswi_job *job, void *own)
{
	uint64_t begun_ns = e->clock->now_ns(e->clock->ctx);
	int error = run_job(e, job, own);
	uint64_t took_ns = e->clock->now_ns(e->clock->ctx) - begun_ns;

	if (!error && job->kind == ISWI_JOB_READ)
		iswi_latency_add(&e->backup_read_latency, took_ns);
	else if (!error && job->kind == ISWI_JOB_WRITE)
		iswi_latency_add(&e->backup_write_latency, took_ns);
	iswi_backup_done(e, job, error);
}

static void *writer(void *arg)
{
	struct isw_engine *e = arg;
	struct iswi_job job;

	iswi_thread_urgent();
	while (wait_writer(e))
		if (iswi_backup_take(e, false, &job))
			work(e, &job, NULL);
	return NULL;
}

static void *reader(void *arg)
{
	struct isw_engine *e = arg;
	struct iswi_job job;
	void *own;

	iswi_thread_urgent();
	pthread_mutex_lock(&e->backup->lock);
	own = e->readers_data + e->backup->readers_count++ * e->leg_bytes;
	pthread_mutex_unlock(&e->backup->lock);
	while (wait_reader(e))
		while (iswi_backup_take(e, true, &job))
			work(e, &job, own);
	return NULL;
}

/* Looks for slow reads, all of which may be those of a disk that hangs with every reader. */
static void *watcher(void *arg)
{
	struct isw_engine *e = arg;
	struct iswi_backup *b = e->backup;

	iswi_thread_urgent();
	pthread_mutex_lock(&b->lock);
	while (!b->stop) {
		b->slow_watch_ns = UINT64_MAX;
		for (struct iswi_op *op = b->slow_head; op; op = op->slow_next)
			b->slow_watch_ns = ISWI_MIN(b->slow_watch_ns, iswi_backup_slow_ns(op));
		wait_until(b, &b->slow_cond, b->slow_watch_ns);
		pthread_mutex_unlock(&b->lock);
		while (iswi_backup_slow(e, e->clock->now_ns(e->clock->ctx)))
			;
		pthread_mutex_lock(&b->lock);
	}
	pthread_mutex_unlock(&b->lock);
	return NULL;
}

static int start_watcher(struct isw_engine *e, struct isw_error *error)
{
	int code;

	if (!(e->config.flags & ISW_ENGINE_QUICKER))
		return 0;
	code = iswi_thread_start(&e->backup->watcher, "isw-backup-slow", watcher, e);
	e->backup->watched = !code;
	return code ? iswi_error(error, code, "cannot start a backup thread") : 0;
}

int iswi_backup_start(struct isw_engine *e, struct isw_error *error)
{
	struct iswi_backup *b = e->backup;
	uint32_t writers = e->config.backup_writers, all = writers + e->config.backup_readers;

	for (uint32_t i = 0; i < all; i++) {
		char name[16];
		int code;

		snprintf(name, sizeof(name), "isw-backup-%c%u", i < writers ? 'w' : 'r',
			 (i < writers ? i : i - writers) % 100);
		code = iswi_thread_start(&b->threads[i], name, i < writers ? writer : reader, e);
		if (code)
			return iswi_error(error, code, "cannot start a backup thread");
		b->threads_count++;
	}
	return start_watcher(e, error);
}

void iswi_backup_stop(struct isw_engine *e)
{
	struct iswi_backup *b = e->backup;

	pthread_mutex_lock(&b->lock);
	b->stop = true;
	pthread_cond_broadcast(&b->write_cond);
	pthread_cond_broadcast(&b->read_cond);
	pthread_cond_broadcast(&b->slow_cond);
	pthread_mutex_unlock(&b->lock);
	for (uint32_t i = 0; i < b->threads_count; i++)
		pthread_join(b->threads[i], NULL);
	if (b->watched)
		pthread_join(b->watcher, NULL);
	if (b->ops && b->ctx)
		b->ops->destroy(b->ctx);
}
