/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: one device's pages, wherever they are.
 *
 * A page's newest bytes are, in this order of preference, in a staging buffer, on a donor
 * (remote-valid), on the backup (backup-current), or nowhere (neither bit, not staged: zeros).
 *
 * Rules that hold after every handler, with no lock held:
 *  R1  The newest version of a page is staged until a copy of it is where the backup mode wants
 *      one: backup-current is set, or without a backup remote-valid is (or the page is lost).
 *  R2  remote-valid is set only by the acknowledgement of the newest version, on a slab mapped
 *      since before it was sent, and is cleared before the next version is sent.
 *  R3  At most one remote write and one backup write per page are in flight; newer data waits
 *      for the end of both and supersedes what is queued.
 *  R4  A request is done when each of its pages is safe: acknowledged while still staged, or on
 *      the backup, in its own or a newer version.
 *  R5  A slab's place is used only between a get and a put of it; DRAINED is reported, and the
 *      queues of a remote are replaced, only when no such use is left.
 *  R6  A copy (copy.c) begins only on a page without an entry, and is of version 0: any write or
 *      zeroing outdates it. Its buffer is nobody's to read before its bytes were verified; then it
 *      is staged, and sent under the rules of a write.
 *  R7  A hedged read (hedge.c) has two legs, each with staging buffers of its own: from the moment
 *      there are two, neither writes into the request. The first that ended with verified bytes
 *      copies them there and is the request's end; the other one then looks at nothing of it. When
 *      both ended badly the last one goes on for the request. Buffers and ops of both are given
 *      back when both have ended, by completion events only; the donor's leg keeps its use of the
 *      slab's place until its own (R5).
 *  R8  A slab that migrates has two places. Writes go to its current one, where a page was valid
 *      last says at_place, and only an acknowledgement moves it. A place becomes current before
 *      anybody looks whether the other one is still written to.
 *
 * Rules of the arena, that hold after every single store to it, locks or not: the process may be
 * killed there, and a successor (recover.c) has nothing else to go by.
 *  R9  A descriptor is committed by the store of its page, after its bytes, version and checksum.
 *      A page is what its newest committed descriptor says, or what its bits say if it has none. So
 *      a version is committed before older ones are cleared, then the bits, then the checksum of
 *      the page changes; and what makes a version safe elsewhere (R1) is stored before its
 *      descriptor is cleared.
 *  R10 Only a page's newest version has a descriptor, but for the moment in which a newer one was
 *      committed: a superseded or zeroed version loses its own though transfers still hold its
 *      buffer, or it would come back when the newer one is freed. Buffers of copies and hedged
 *      reads have none.
 *  R11 The bit that says where a page is valid is set before the one that said where it was, or
 *      that it was lost, is cleared; at_place is stored before remote-valid is set.
 *  R12 A place's word is stored after all else of its mapping, before it becomes current; it says
 *      UNMAPPED only when no bit names the place any more.
 *  R13 Arena and backup have one owner, who holds a lock of each that ends with its last thread and
 *      its last write. Who takes over looks at everything first, and changes nothing when it
 *      refuses; then each of its own stores keeps these rules, too.
 *
 * Locks, outermost first (never two of one kind):
 *   isw_engine.control    remotes and slab mapping, control thread only, may block
 *   iswi_shard.lock       entries, versions, page bits and checksums of the shard's pages
 *   iswi_backup.lock      backup queue, flush state
 *   staging.lock, ops_lock, entries_lock, waiting.lock   leaves
 * No lock is held while a transport's submit or a request's done runs.
 */
#ifndef ISWI_ENGINE_INTERNAL_H
#define ISWI_ENGINE_INTERNAL_H

#include <sys/uio.h>

#include "engine/request.h"
#include "transport/rdma.h"
#include "transport/transport.h"
#include "util/util.h"

#define ISWI_NONE UINT32_MAX
/* Pages of one group share a shard lock and one word of each bitmap. */
#define ISWI_GROUP_PAGES       32u
#define ISWI_SHARDS            64u
#define ISWI_HASH_PER_SHARD    1024u
#define ISWI_REMOTE_QUEUES_MAX 16u
/* Pages of this many bytes keep to one connection, so that a sequential run is one transfer. */
#define ISWI_STRIPE_PAGES     256u
#define ISWI_NO_EPOCH         0xff
#define ISWI_BACKUP_BATCH_MAX 256u
#define ISWI_BACKUP_RETRY_NS  1000000000ull
/* Pages being copied to donors at once: what a fault's read may find before it on a connection. */
#define ISWI_COPY_PAGES_MAX 256u
/* A donor that owes this many hedged reads is not asked for what the backup has. */
#define ISWI_HEDGES_MAX 8u
/* For each lock of a predecessor who was killed: its last writes may be on a slow disk. */
#define ISWI_OWNER_WAIT_MS 10000u

/* ---------------------------------------------------------------- shared arena */

/*
 * What a test build (ISW_CRASH_POINTS) gets told after every store to the arena that a successor
 * may look at; defined by the test program, which may end the process there.
 */
#ifdef ISW_CRASH_POINTS
void iswi_crash_point(void);
#else
static inline void iswi_crash_point(void)
{
}
#endif

/* Stores to the arena, in the order in which they stand: R9 to R12 are made of these. */
static inline void iswi_keep32(atomic_uint *at, uint32_t value)
{
	atomic_store_explicit(at, value, memory_order_release);
	iswi_crash_point();
}
static inline void iswi_keep64(atomic_uint_fast64_t *at, uint64_t value)
{
	atomic_store_explicit(at, value, memory_order_release);
	iswi_crash_point();
}
/* What one thread at a time writes, under a lock that the reader holds as well. */
static inline uint32_t iswi_kept32(const atomic_uint *at)
{
	return atomic_load_explicit(at, memory_order_relaxed);
}
static inline uint64_t iswi_kept64(const atomic_uint_fast64_t *at)
{
	return atomic_load_explicit(at, memory_order_relaxed);
}

enum iswi_arena_phase {
	ISWI_ARENA_UNFINISHED, /* being made, or its tables are being loaded */
	ISWI_ARENA_READY
};

/*
 * Everything that must survive the process, and everything a device may address, lies in one
 * mapping addressed by offsets from its start; the state file, when there is one, backs it.
 */
struct iswi_arena_header {
	uint64_t magic;
	uint32_t
		version; /* of this layout: changes with every structure below, and what it means */
	uint32_t header_crc; /* of all before phase, with header_crc 0 */
	char boot_id[40];
	uint64_t bytes, size_bytes, slab_bytes;
	uint32_t staging_pages, remotes_max, no_backup, reserved;
	uint64_t slabs_offset, remote_valid_offset, at_place_offset, backup_current_offset;
	uint64_t crc_offset, records_offset;
	uint64_t slots_offset, staging_offset;

	atomic_uint phase;
};

/* Whose lease a remote is, in Python's words: of the two the newer one that is whole. */
struct iswi_record {
	struct iswi_record_copy {
		atomic_uint sequence; /* 0: being written; stored last */
		uint32_t length;      /* 0: there is none any more */
		uint32_t crc;
		unsigned char data[ISW_RECORD_BYTES_MAX];
	} copies[2];
};

/* A slot of a donor's. in_flight pairs with word: raised before word is read (place_get). */
struct iswi_place {
	atomic_uint_fast64_t word;      /* state in the low 8 bits, mapping number above; seq_cst */
	atomic_uint_fast64_t in_flight; /* uses; seq_cst against word */
	/* Written while UNMAPPED; read while a use is held, or under the control lock. */
	atomic_uint_fast64_t generation; /* relaxed: published by word */
	atomic_uint remote, slot;        /* relaxed: published by word */
	atomic_uint reported; /* ISW_EVENT_SLAB_ERROR was sent for this mapping; relaxed */
};

/*
 * One slab: where it is, and while it migrates, where it was. Of a slab that does not, the place
 * that is not current is UNMAPPED.
 */
struct iswi_slab {
	struct iswi_place places[2];
	atomic_uint current;                                          /* where writes go; seq_cst */
	atomic_uint_fast64_t page_ins, page_outs, remote_valid_pages; /* relaxed statistics */
};

#define ISWI_NO_PAGE UINT64_MAX

/* Descriptor of one staging buffer. A successor believes it only while it names a page. */
struct iswi_slot {
	atomic_uint_fast64_t page; /* or ISWI_NO_PAGE; stored last, which commits it (R9) */
	uint32_t version;
	uint32_t crc;
};

/* Versions count up and around; those of a page that meet are never far apart. */
static inline bool iswi_is_newer(uint32_t version, uint32_t than)
{
	return (int32_t)(version - than) > 0;
}
/* 0 is nobody's: see iswi_entry. */
static inline uint32_t iswi_version_after(uint32_t version)
{
	return version + 1 ? version + 1 : 1;
}

/* ------------------------------------------------------------------ page state */

/* A use of a slab's place: whoever has one may send there. */
struct iswi_use {
	uint64_t word;
	uint32_t place;
};

/* What only the running process knows of a staging buffer. Under its page's shard lock. */
struct iswi_slot_use {
	struct iswi_req *req; /* not yet told that this page is safe */
	uint32_t older;       /* next slot of the same page, ISWI_NONE at the end */
	uint16_t refs;        /* transfers that read from the buffer */
	bool copy;            /* of a copy or hedged read; staging lock when it is given back */
};

enum iswi_backup_state {
	ISWI_B_IDLE,
	ISWI_B_QUEUED, /* in the queue */
	ISWI_B_BUSY,   /* being written */
	ISWI_B_FAILED  /* in the list of those to retry */
};

/* A page with a write or copy in flight or staged. Lives while it has a slot or a transfer. */
struct iswi_entry {
	uint64_t page;
	uint32_t hash_next;
	uint32_t newest;  /* slot list, newest first; its head may be older than version (zeroed) */
	uint32_t version; /* 0: nobody has written it since a copy made the entry */
	uint32_t backup_prev, backup_next; /* queue or failed list; backup lock */
	uint8_t backup_state;
	uint8_t flush_epoch; /* which epoch counts this page while it is not IDLE */
	uint8_t again_epoch; /* while BUSY: the epoch of the first newer version */
	bool backup_ailing;  /* backup lock */
	bool remote_busy;
	bool remote_wanted; /* newer data waits for the write in flight */
	bool copying;       /* a copy is being read; its buffer is not in the slot list yet */
};

struct iswi_shard {
	pthread_mutex_t lock;
	uint32_t entries;
	uint32_t hash[ISWI_HASH_PER_SHARD];
} __attribute__((aligned(64)));

/* ------------------------------------------------------------------- transfers */

#define ISWI_TRIED_REMOTE 0x3 /* a donor has failed this read: a bit for each place */
#define ISWI_TRIED_BACKUP 0x4
#define ISWI_RETRIED      0x8  /* bytes and checksum differed once: a write may have passed by */
#define ISWI_HEDGED       0x10 /* was hedged, in vain: it is not again */

static inline uint8_t iswi_tried_place(uint32_t place)
{
	return (uint8_t)(1u << place);
}

/* Of a hedged read: what became of its legs. */
#define ISWI_HEDGE_WON         0x1 /* one of them answers the request, or has */
#define ISWI_HEDGE_REMOTE_END  0x2
#define ISWI_HEDGE_BACKUP_END  0x4
#define ISWI_HEDGE_REMOTE_FAIL 0x8 /* ended with an error */
#define ISWI_HEDGE_BACKUP_FAIL 0x10

/* One transfer to or from a donor, or a read of the backup: a run of pages of one slab. */
struct iswi_op {
	struct iswi_xfer xfer;
	struct isw_engine *engine;
	struct iswi_req *req; /* reads */
	uint64_t page;
	/* The place's, when the op was made; of a copy's read the place's where it shall go. */
	uint64_t word;
	uint32_t pages;
	uint32_t slab;
	uint8_t place;   /* of which it holds a use */
	uint32_t slot;   /* writes, copies: first of `pages` consecutive staging buffers */
	uint32_t crc;    /* reads: the first page's checksum when they began */
	uint32_t remote; /* where it was sent */
	uint8_t tried;
	bool copy;            /* of copy.c: a read without a request, then a write */
	bool pull;            /* a copy from the slab's other place */
	struct iswi_op *next; /* free list or backup read queue */
	struct iswi_op *twin; /* of a hedged read: the other leg */
	atomic_uint hedge;    /* ISWI_HEDGE_*, in the donor's leg; seq_cst: orders the legs' ends */
};

/* --------------------------------------------------------------------- backup */

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

struct iswi_backup {
	const struct iswi_backup_ops *ops;
	void *ctx;
	pthread_mutex_t lock;
	pthread_cond_t write_cond, read_cond;
	bool stop;
	uint32_t queue_head, queue_tail; /* entries QUEUED */
	uint32_t failed_head;            /* entries FAILED */
	uint64_t failed_count;
	uint64_t ailing_count; /* pages that failed and were not written since */
	uint64_t retry_ns;
	bool alarm; /* BACKUP_FAILING was reported, BACKUP_RECOVERED not yet */
	struct iswi_op *read_head, **read_tail; /* for requests: before all copies */
	struct iswi_op *copy_head, **copy_tail;
	bool copy_busy; /* one reader reads for a copy: the others are free for faults */
	/* Flush: epochs as in iswi_flush_submit. */
	uint64_t outstanding[2];
	uint8_t epoch;
	enum { ISWI_FLUSH_IDLE, ISWI_FLUSH_DRAIN, ISWI_FLUSH_READY, ISWI_FLUSH_SYNC } flush_state;
	struct iswi_req *flush_now, *flush_next;
	pthread_t threads[16];
	uint32_t threads_count;
};

/* --------------------------------------------------------------------- engine */

enum iswi_remote_state {
	ISWI_REMOTE_UNUSED,
	ISWI_REMOTE_UP,
	ISWI_REMOTE_DOWN,
	ISWI_REMOTE_CHANGING /* a control thread connects or destroys it */
};

struct iswi_remote {
	struct isw_engine *engine;
	atomic_int state;         /* seq_cst, pairs with the slabs' words: see fence in remote.c */
	atomic_bool broken;       /* a queue went down; set before state is looked at */
	atomic_uint fencing;      /* threads that still shut queues down; seq_cst */
	atomic_uint queues_count; /* like queues: published by state, looked at for status */
	struct iswi_queue *queues[ISWI_REMOTE_QUEUES_MAX];
	/* Like queues, where the transport wants one: no pages go over it, it sees the donor's
	 * death. */
	struct iswi_queue *witness;
	atomic_uint transport; /* ISW_TRANSPORT_*; relaxed: for statistics */
	struct iswi_queue_events events;
	/* Relaxed statistics; pages by transport. */
	atomic_uint_fast64_t read_pages[ISW_TRANSPORTS], write_pages[ISW_TRANSPORTS], errors;
	/* Relaxed: a guess, to which each queue's thread contributes; a lost one does no harm. */
	atomic_uint_fast64_t read_tail_ns, tail_raised_ns;
	atomic_uint hedges; /* hedged reads it has not answered yet; relaxed: a guess for others */
};

/* Totals that are counted one by one, by the names that struct isw_engine_stats has for them. */
#define ISWI_COUNTERS(COUNTER)                                                                     \
	COUNTER(read_requests);                                                                    \
	COUNTER(write_requests);                                                                   \
	COUNTER(trim_requests);                                                                    \
	COUNTER(zero_requests);                                                                    \
	COUNTER(flush_requests);                                                                   \
	COUNTER(requests_failed);                                                                  \
	COUNTER(pages_in);                                                                         \
	COUNTER(pages_in_remote);                                                                  \
	COUNTER(pages_in_staging);                                                                 \
	COUNTER(pages_in_backup);                                                                  \
	COUNTER(pages_in_zero);                                                                    \
	COUNTER(pages_out);                                                                        \
	COUNTER(pages_out_remote);                                                                 \
	COUNTER(pages_out_backup);                                                                 \
	COUNTER(pages_out_superseded);                                                             \
	COUNTER(backup_write_requests);                                                            \
	COUNTER(fallback_unmapped);                                                                \
	COUNTER(fallback_suspended);                                                               \
	COUNTER(fallback_invalid);                                                                 \
	COUNTER(fallback_error);                                                                   \
	COUNTER(remote_errors);                                                                    \
	COUNTER(crc_errors_remote);                                                                \
	COUNTER(crc_errors_backup);                                                                \
	COUNTER(backup_errors);                                                                    \
	COUNTER(staging_waits);                                                                    \
	COUNTER(pages_copied);                                                                     \
	COUNTER(pages_copy_dropped);                                                               \
	COUNTER(pages_migrated);                                                                   \
	COUNTER(fallback_slow);                                                                    \
	COUNTER(hedged_reads);                                                                     \
	COUNTER(hedged_wins);

struct iswi_counters {
#define COUNTER(name) atomic_uint_fast64_t name
	ISWI_COUNTERS(COUNTER)
#undef COUNTER
	atomic_uint_fast64_t in_flight, copies_begun;
};


struct isw_engine {
	struct isw_engine_config config;
	const struct iswi_clock *clock;
	uint64_t pages, slab_pages;
	uint32_t slabs_count;
	bool has_backup;

	struct iswi_arena_header *arena;
	uint64_t arena_bytes;
	int state_lock_fd; /* its flock says whose the state file is; -1 without one */
	bool standby;      /* the arena is another process's: it is not even looked at */
	bool stranded;     /* staged pages may wait for their slab to be mapped; see write.c */
	struct iswi_slab *slabs;
	atomic_uint *remote_valid, *backup_current; /* one word a group; shard lock */
	atomic_uint *at_place;                      /* of a remote-valid page: at which one it is */
	atomic_uint *crc;                           /* of the newest version; shard lock */
	struct iswi_record *records;                /* one a remote; control lock */
	struct iswi_slot *slots;
	unsigned char *staging;

	struct iswi_shard *shards;
	struct iswi_slot_use *slot_uses;
	struct iswi_entry *entries;
	uint32_t entries_free; /* through hash_next */
	pthread_mutex_t entries_lock;

	struct {
		pthread_mutex_t lock;
		uint64_t *free_bits;
		uint32_t words, cursor, used;
		uint32_t copies; /* of those used, by copies and hedged reads */
	} staging_alloc;

	struct {
		pthread_mutex_t lock;
		struct iswi_req *head, **tail;
		bool busy, again;
	} waiting; /* writes without a staging buffer */

	struct iswi_op *ops, *ops_free;
	pthread_mutex_t ops_lock;
	void *volatile_memory;
	size_t volatile_bytes;

	struct iswi_backup backup;
	pthread_mutex_t control;
	struct iswi_remote *remotes;
	struct iswi_rdma_domains rdma;
	uint64_t mappings;         /* numbers places' words; control lock */
	atomic_uint_fast64_t pull; /* slab that is pulled, next group of it below: see copy.c */
	struct iswi_events events;
	struct iswi_counters count;
	struct iswi_latency read_latency, write_latency, remote_read_latency, remote_write_latency,
		backup_read_latency, backup_write_latency;
};

/* engine.c */
int iswi_engine_make(const struct isw_engine_config *config, struct isw_engine **engine_out,
		     struct isw_error *error);

/* state.c: the arena and the file that backs it */
/* Maps a new arena; of a standby, the one that another process serves from. */
int iswi_arena_map(struct isw_engine *e, struct isw_error *error);
void iswi_arena_unmap(struct isw_engine *e);
/* Another process may take over from this one, from now on. */
void iswi_arena_ready(struct isw_engine *e);
/* Makes the state file ours; -EWOULDBLOCK when its owner lives on for wait_ms_max. */
int iswi_arena_own(struct isw_engine *e, uint32_t wait_ms_max, struct isw_error *error);
void iswi_arena_disown(struct isw_engine *e);
/* By a standby: is it whole, of this boot, and what it was when we mapped it? */
int iswi_arena_check(const struct isw_engine *e, struct isw_error *error);

/* recover.c */
/* An arena that is ours and ready becomes this engine's state; see there. */
int iswi_recover(struct isw_engine *e, struct isw_error *error);

/* record.c; under the control lock, or before anybody else knows the engine */
uint32_t iswi_record_read(const struct isw_engine *e, uint32_t remote, void *data_out);
void iswi_record_write(struct isw_engine *e, uint32_t remote, const void *data, uint32_t length);

/* memory.c: staging buffers, entries, ops */
int iswi_memory_create(struct isw_engine *e, struct isw_error *error);
void iswi_memory_destroy(struct isw_engine *e);
/* Up to `want` consecutive free buffers; returns how many (0: none), the first in *slot_out. */
uint32_t iswi_staging_take(struct isw_engine *e, uint32_t want, uint32_t *slot_out);
/*
 * The same for a copy or a hedged read: none when these have spare_max already, and only so many
 * that at least half of all stay free.
 */
uint32_t iswi_staging_take_spare(struct isw_engine *e, uint32_t want, uint32_t spare_max,
				 uint32_t *slot_out);
void iswi_staging_give(struct isw_engine *e, uint32_t slot);
/* This very one, which is free, by who has found it in use in the arena. */
void iswi_staging_claim(struct isw_engine *e, uint32_t slot);
/* How many are in use, and of these by copies and hedged reads, which nobody would miss. */
void iswi_staging_count(struct isw_engine *e, uint32_t *used_out, uint32_t *copies_out);
struct iswi_op *iswi_op_take(struct isw_engine *e);
void iswi_op_give(struct isw_engine *e, struct iswi_op *op);

/* page.c: page state; all under the page's shard lock */
struct iswi_shard *iswi_shard_of(struct isw_engine *e, uint64_t page);
struct iswi_entry *iswi_entry_find(struct isw_engine *e, uint64_t page);
struct iswi_entry *iswi_entry_make(struct isw_engine *e, uint64_t page);
/* The slot that holds the newest version, or ISWI_NONE. */
uint32_t iswi_entry_newest(const struct isw_engine *e, const struct iswi_entry *entry);
/*
 * Tells the requests that wait for versions up to `version`; those then complete are put on
 * *done_list (through next), to be finished without the lock.
 */
void iswi_entry_safe(struct isw_engine *e, struct iswi_entry *entry, uint32_t version,
		     struct iswi_req **done_list);
/* The descriptor of a version that is superseded, zeroed or safe elsewhere (R9, R10). */
static inline void iswi_slot_clear(struct isw_engine *e, uint32_t slot)
{
	if (iswi_kept64(&e->slots[slot].page) != ISWI_NO_PAGE)
		iswi_keep64(&e->slots[slot].page, ISWI_NO_PAGE);
}
/* Gives back what nobody needs any more; returns how many staging buffers that were. */
uint32_t iswi_entry_collect(struct isw_engine *e, struct iswi_entry *entry);

static inline bool iswi_bit(const atomic_uint *bits, uint64_t page)
{
	return iswi_kept32(&bits[page / ISWI_GROUP_PAGES]) >> (page % ISWI_GROUP_PAGES) & 1;
}
static inline void iswi_bit_set(atomic_uint *bits, uint64_t page)
{
	atomic_uint *word = &bits[page / ISWI_GROUP_PAGES];

	iswi_keep32(word, iswi_kept32(word) | 1u << page % ISWI_GROUP_PAGES);
}
static inline void iswi_bit_clear(atomic_uint *bits, uint64_t page)
{
	atomic_uint *word = &bits[page / ISWI_GROUP_PAGES];

	iswi_keep32(word, iswi_kept32(word) & ~(1u << page % ISWI_GROUP_PAGES));
}
/*
 * Without a backup backup_current means "lost": the page had contents that nobody has any more,
 * and reading it is an error, never zeros.
 */
static inline void iswi_lost_set(struct isw_engine *e, uint64_t page)
{
	iswi_bit_set(e->backup_current, page);
}
static inline uint32_t iswi_place_at(const struct isw_engine *e, uint64_t page)
{
	return iswi_bit(e->at_place, page);
}
void iswi_remote_valid_set(struct isw_engine *e, uint64_t page, uint32_t place);
void iswi_remote_valid_clear(struct isw_engine *e, uint64_t page);
static inline void iswi_backup_current_set(struct isw_engine *e, uint64_t page)
{
	iswi_bit_set(e->backup_current, page);
}
static inline void iswi_backup_current_clear(struct isw_engine *e, uint64_t page)
{
	if (iswi_bit(e->backup_current, page))
		iswi_bit_clear(e->backup_current, page);
}

/* request.c */
/* Takes one from pending and finishes the request when it was the last. */
void iswi_req_put(struct isw_engine *e, struct iswi_req *req);
void iswi_req_fail(struct iswi_req *req, int error);
void iswi_req_finish_list(struct isw_engine *e, struct iswi_req *list);

/* read.c, write.c, trim.c */
/* plug: of the thread that submits the request, NULL when there is none or it goes on later. */
void iswi_read(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug);
void iswi_read_backup_done(struct iswi_op *op, int error);
void iswi_write(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug);
/*
 * A remote write of one staged page, by a holder of that use; it may be grown by the pages that
 * follow in the device and in staging. For each, remote_busy is set and the buffer held.
 */
struct iswi_op *iswi_write_op(struct isw_engine *e, uint64_t page, uint32_t slot,
			      const struct iswi_use *use);
/*
 * The slab has a place again: what a predecessor left staged and no backup takes is sent there.
 */
void iswi_write_stranded(struct isw_engine *e, uint32_t slab);
/* Staging buffers became free, or the backup began to fail: goes on with waiting writes. */
void iswi_write_kick(struct isw_engine *e);
void iswi_zero(struct isw_engine *e, struct iswi_req *req);

/* Of consecutive pages of one group: a bit for each whose bytes do not match its checksum. */
uint32_t iswi_read_wrong(struct isw_engine *e, const unsigned char *data, uint64_t page,
			 uint32_t count);
/* Reads pages of one slab for a request, again, by who holds one of its pending. */
void iswi_read_again(struct isw_engine *e, struct iswi_req *req, uint64_t page, uint64_t end,
		     uint8_t tried);

/* hedge.c */
/* After how long a read of this remote is slow, in microseconds; 0: it never is. */
uint32_t iswi_hedge_after_us(const struct isw_engine *e, const struct iswi_remote *r);
/* A read of this remote was answered. */
void iswi_hedge_note(struct iswi_remote *r, uint64_t submitted_ns, uint64_t now_ns);
/* It owes so many answers that reads had better pass it by. */
bool iswi_hedge_avoid(const struct iswi_remote *r);
/* A transfer's slow. */
void iswi_hedge_slow(struct iswi_xfer *xfer, uint32_t received);
/* A leg has ended; of the donor's the use of the slab was given back. */
void iswi_hedge_ended(struct iswi_op *op, bool remote, int error);

/* copy.c */
static inline void iswi_copy_count(struct isw_engine *e, bool pull, bool arrived)
{
	if (!arrived)
		iswi_count(&e->count.pages_copy_dropped, 1);
	else
		iswi_count(pull ? &e->count.pages_migrated : &e->count.pages_copied, 1);
}
void iswi_copy_read_done(struct iswi_op *op, int error);
/* A copy of a slab's other place has ended: goes on with the next, by whoever holds no lock. */
void iswi_pull_on(struct isw_engine *e);
/* The slab has a new place: the pass that may have been made is none to it. */
void iswi_pull_anew(struct isw_engine *e, uint32_t slab);

/* backup.c: the queue and its two handlers, which threads (or steps) call in turn */
int iswi_backup_start(struct isw_engine *e, struct isw_error *error);
void iswi_backup_stop(struct isw_engine *e);
/* Under the shard lock: new data for the page. */
void iswi_backup_enqueue(struct isw_engine *e, struct iswi_entry *entry);
/* Under the shard lock: the page needs no backup write any more (zeroed). */
void iswi_backup_cancel(struct isw_engine *e, struct iswi_entry *entry);
void iswi_backup_read(struct isw_engine *e, struct iswi_op *op);
bool iswi_backup_take(struct isw_engine *e, bool reads, struct iswi_job *job);
int iswi_backup_run(struct isw_engine *e, struct iswi_job *job);
void iswi_backup_done(struct isw_engine *e, struct iswi_job *job, int error);
/* Failed pages are queued again. */
bool iswi_backup_retry(struct isw_engine *e);
/* More is failing than staging can carry: writes that find no buffer are refused. */
bool iswi_backup_hopeless(struct isw_engine *e);
void iswi_flush(struct isw_engine *e, struct iswi_req *req);

/* backup_file.c */
extern const struct iswi_backup_ops iswi_backup_file_ops;
/* A predecessor's must be there, and its last writes are waited for. */
int iswi_backup_file_open(const char *path, uint64_t bytes, bool predecessors, void **ctx_out,
			  struct isw_error *error);
/* Tries to get a lock that a killed process may still hold; 0, or -EWOULDBLOCK, or -errno. */
int iswi_flock_wait(int fd, uint32_t wait_ms_max);

/* slab.c */
static inline uint32_t iswi_word_state(uint64_t word)
{
	return word & 0xff;
}
static inline struct iswi_place *iswi_place(const struct isw_engine *e, uint32_t slab,
					    uint32_t place)
{
	return &e->slabs[slab].places[place];
}
/* By who holds a use of it. */
static inline struct iswi_remote *iswi_remote_of(const struct isw_engine *e, uint32_t slab,
						 uint32_t place)
{
	return &e->remotes[atomic_load_explicit(&iswi_place(e, slab, place)->remote,
						memory_order_relaxed)];
}
/*
 * Raises the place's in_flight and says whether it is MAPPED (*word_out is then its word). When it
 * is not, in_flight is lowered again. Never under a shard lock: the last put clears page bits.
 */
bool iswi_place_get(struct isw_engine *e, uint32_t slab, uint32_t place, uint64_t *word_out);
/* The same under any lock, but in_flight stays raised, also when the place is not MAPPED. */
bool iswi_place_hold(struct isw_engine *e, uint32_t slab, uint32_t place, uint64_t *word_out);
/* One more use, by whoever holds one already. */
void iswi_place_get_more(struct isw_engine *e, uint32_t slab, uint32_t place);
void iswi_place_put(struct isw_engine *e, uint32_t slab, uint32_t place);
/* A use of the slab's current place, where writes go; false when that is not MAPPED. */
bool iswi_slab_get(struct isw_engine *e, uint32_t slab, struct iswi_use *use_out);
/* ISW_NO_REMOTE while it is UNMAPPED. */
uint32_t iswi_place_remote(const struct iswi_place *p);
/* By who takes over: no use of any place is left, and none is MAPPED. */
int iswi_places_check(const struct isw_engine *e, struct isw_error *error);
void iswi_places_recover(struct isw_engine *e);
/* Every place of a remote that is down already: those MAPPED are SUSPENDED from now on. */
void iswi_places_suspend(struct isw_engine *e, uint32_t remote);

/* remote.c */
/* Sends a chain of ops (linked through xfer.next), each holding a use of its place. */
void iswi_remote_submit(struct isw_engine *e, struct iswi_op *first);
/* The same at unplug, or at once when plug is NULL. */
void iswi_remote_send(struct isw_engine *e, struct iswi_op *first, struct iswi_op *last,
		      struct iswi_plug *plug);
/* Its error is counted, its use of the place given back: that may be another donor's after that. */
void iswi_remote_ended(struct isw_engine *e, const struct iswi_op *op, int error);
/* Once, before any remote is reserved. */
void iswi_remote_init(struct isw_engine *e);
/* Reserves a remote number in CHANGING state: a new one, or `remote` itself when it is DOWN. */
int iswi_remote_reserve(struct isw_engine *e, uint32_t *remote);
/* Waits until the old queues are unused, then destroys them. -ETIMEDOUT. */
int iswi_remote_retire(struct isw_engine *e, uint32_t remote);
/* From CHANGING to UP with these queues, or back to `idle_state` when count is 0. */
void iswi_remote_set(struct isw_engine *e, uint32_t remote, struct iswi_queue **queues,
		     uint32_t count, enum iswi_remote_state idle_state);
/* Declares it down: slabs SUSPENDED first, then its queues are shut down. */
void iswi_remote_fence(struct isw_engine *e, uint32_t remote, int error);
void iswi_remote_stop_all(struct isw_engine *e);

#endif
