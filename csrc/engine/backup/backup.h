/* SPDX-License-Identifier: Apache-2.0 */
/* The backup: its queue, the threads that write and read it, and the place of its bytes. */
#ifndef ISWI_BACKUP_BACKUP_H
#define ISWI_BACKUP_BACKUP_H

#include <sys/stat.h>
#include <sys/uio.h>

#include "engine/state/op.h"
#include "engine/state/page.h"
#include "engine/state/speed.h"

#define ISWI_BACKUP_BATCH_MAX   256u
#define ISWI_BACKUP_THREADS_MAX 16u

/*
 * Where the backup's bytes are. All functions block and are called by the backup's threads (or
 * by a step); each returns 0 or -errno. A write that failed may have changed any of its bytes.
 */
struct iswi_backup_ops {
	const char *name;
	int (*write)(void *ctx, const struct iovec *iov, int iov_count, uint64_t offset);
	int (*read)(void *ctx, void *buf, uint32_t bytes, uint64_t offset);
	int (*sync)(void *ctx);
	void (*destroy)(void *ctx);
};

enum iswi_job_kind { ISWI_JOB_WRITE, ISWI_JOB_SYNC, ISWI_JOB_READ };

/* What a backup thread does next: taken under the locks, done without, then reported. */
struct iswi_job {
	enum iswi_job_kind kind;
	uint64_t page;
	uint32_t pages;
	struct iswi_op *op; /* READ */
	uint32_t slots[ISWI_BACKUP_BATCH_MAX];
};

/* Linked by backup_prev and backup_next. */
struct iswi_entry_list {
	uint32_t head, tail;
};

struct iswi_backup {
	const struct iswi_backup_ops *ops;
	void *ctx;
	pthread_mutex_t lock;
	pthread_cond_t write_cond, read_cond, slow_cond;
	bool stop;
	struct iswi_entry_list queue, failed; /* entries QUEUED, and FAILED; oldest first */
	uint32_t queue_count;
	uint32_t due_last; /* up to this entry the queue waits for no neighbours; ISWI_NONE */
	uint64_t due_ns;   /* when what follows it does not either, if anything follows */
	atomic_uint_fast64_t ailing_count; /* pages that failed and were not written since */
	uint64_t retry_ns;
	bool alarm; /* BACKUP_FAILING was reported, BACKUP_RECOVERED not yet */
	struct iswi_op *read_head, **read_tail; /* for requests: before all copies */
	struct iswi_op *copy_head, **copy_tail;
	bool copy_busy;          /* one reader reads for a copy: the others are free for faults */
	struct iswi_speed speed; /* of reads for requests */
	/* Reads with xfer.slow_us that have not taken so long yet; by slow_next, in any order. */
	struct iswi_op *slow_head;
	uint64_t slow_watch_ns; /* when the watcher looks next; UINT64_MAX: when it is told */
	atomic_uint slow_count; /* ... under way that have, and longer than expected: owed */
	/* Flush: epochs as in flush.c. */
	uint64_t outstanding[2];
	uint8_t epoch;
	enum { ISWI_FLUSH_IDLE, ISWI_FLUSH_DRAIN, ISWI_FLUSH_READY, ISWI_FLUSH_SYNC } flush_state;
	struct iswi_req *flush_now, *flush_next;
	pthread_t threads[ISWI_BACKUP_THREADS_MAX];
	uint32_t threads_count, readers_count;
	pthread_t watcher;
	bool watched; /* by that thread */
};

/* Before anything else; its ops, ctx and threads come later. */
void iswi_backup_init(struct iswi_backup *b);
int iswi_backup_start(struct isw_engine *e, struct isw_error *error);
void iswi_backup_stop(struct isw_engine *e);
/* Under the shard lock: new data for the page. hurry: its request ends with the backup write. */
void iswi_backup_enqueue(struct isw_engine *e, struct iswi_entry *entry, bool hurry);
/* Under the shard lock: the page was zeroed and needs no backup write. */
void iswi_backup_cancel(struct isw_engine *e, struct iswi_entry *entry);
/* Somebody waits for the backup write of a queued page, as its donor has failed. */
void iswi_backup_hurry(struct isw_engine *e);
/*
 * op->done follows, on a reader; when xfer.buf is NULL it finds the bytes in memory of that reader,
 * which it does not keep. When xfer.slow_us is set and the read takes that long, xfer.slow
 * is called, once, on the watcher; op->done may come meanwhile. It sees in op->slow whether it was.
 */
void iswi_backup_read(struct isw_engine *e, struct iswi_op *op);
/* Calls xfer.slow of one read that is slow by now; false: there is none. */
bool iswi_backup_slow(struct isw_engine *e, uint64_t now_ns);
/* How long is long for a read of so many pages. */
uint32_t iswi_backup_slow_after_us(const struct isw_engine *e, uint32_t pages);
/*
 * Nobody asks it for what a donor has too: its writes fail, or it owes a slow read. The answer to
 * that one tells whether it is back.
 */
static inline bool iswi_backup_avoid(const struct iswi_backup *b)
{
	return atomic_load_explicit(&b->ailing_count, memory_order_relaxed) ||
	       atomic_load_explicit(&b->slow_count, memory_order_relaxed);
}
bool iswi_backup_take(struct isw_engine *e, bool reads, struct iswi_job *job);
void iswi_backup_done(struct isw_engine *e, struct iswi_job *job, int error);
/* Failed pages are queued again. */
bool iswi_backup_retry(struct isw_engine *e);
/* More is failing than staging can carry: writes that find no buffer are refused. */
bool iswi_backup_hopeless(struct isw_engine *e);
/* Ends the request when every write that was done before is on the disk. */
void iswi_flush(struct isw_engine *e, struct iswi_req *req);

/* When such a read is slow. */
static inline uint64_t iswi_backup_slow_ns(const struct iswi_op *op)
{
	return op->xfer.submitted_ns + op->xfer.slow_us * 1000ull;
}

/* Among the files of this room. The first three under the backup lock. */
/* A page that this epoch counted needs no backup write now. */
void iswi_flush_less(struct iswi_backup *b, uint8_t epoch);
/* Takes all flushes in wait, to be answered with an error. */
struct iswi_req *iswi_flush_give_up(struct iswi_backup *b);
static inline bool iswi_backup_may_copy(const struct iswi_backup *b)
{
	return b->copy_head && !b->copy_busy;
}
void iswi_flush_synced(struct isw_engine *e, int error);
/*
 * Whether pages are queued that wait for no neighbours. When a page's time has come, that is true
 * of all that are queued then.
 */
bool iswi_backup_due(const struct isw_engine *e);

extern const struct iswi_backup_ops iswi_backup_file_ops;
/* Of a predecessor: the file must exist, and its last writes end first. */
int iswi_backup_file_open(const char *path, uint64_t bytes, bool predecessors, void **ctx_out,
			  struct isw_error *error);
/*
 * Opens a file, which it makes if there is none, or a disk; returns the descriptor, or -errno.
 * predecessors: the file must exist. st_out: of the open file. is_new_out: this call made it.
 */
int iswi_backup_open(const char *path, bool predecessors, struct stat *st_out, bool *is_new_out,
		     struct isw_error *error);

#endif
