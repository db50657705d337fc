/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: one device's pages, wherever they are.
 *
 * A page's newest bytes are, in this order of preference, in a staging buffer, on a donor
 * (remote-valid), on the backup (backup-current), or nowhere (neither bit, not staged: zeros).
 *
 * Rules that hold after every handler, with no lock held:
 *  R1  The newest version of a page stays staged until a copy of it is where the backup mode
 *      requires one: backup-current is set, or without a backup remote-valid (or the page is lost).
 *  R2  remote-valid is set only by the acknowledgement of the newest version, on a slab mapped
 *      since before that version was sent, and is cleared before the next version is sent.
 *  R3  At most one remote write and one backup write per page are in flight; newer data waits
 *      for the end of both and supersedes what is queued.
 *  R4  A request is done when each of its pages is safe: acknowledged while still staged, or on
 *      the backup, in its own or a newer version.
 *  R5  A slab's place is used only between a get and a put of it; DRAINED is reported, and the
 *      queues of a remote are replaced, only when no such use is left.
 *  R6  A copy (ops/copy.c) begins only on a page without an entry and has version 0, so any write
 *      or zeroing outdates it. Its buffer is not read before its bytes are verified; then it is
 *      staged and sent under the rules of a write.
 *  R7  A hedged read (ops/hedge.c) has two legs, neither of which writes into the request: each
 *      has a buffer of its own, or, in a bare hedge, the donor's has none. The first leg that ends
 *      with verified bytes copies them into the request and ends it; the other leg then touches
 *      nothing of the request. When the donor's leg ends well without a buffer and is first, its
 *      pages are read again, likewise once; when both legs fail, the last one to end goes on for
 *      the request. Buffers and ops of both legs are given back when both have ended, and only by
 *      completion events; the donor's leg keeps its use of the slab's place until its own end (R5).
 *      What a leg in vain brings may be half of a newer version, and nobody looks at it.
 *  R8  A slab that migrates has two places. Writes go to the current one, at_place says where a
 *      page was valid last, and only an acknowledgement moves it. A place becomes current before
 *      anybody checks whether the other one is still written to.
 *  R14 A page read ahead (ops/ahead.c) may be had while its bit is set in its group. The bit is set
 *      when the read begins, of a page that is remote-valid where it is read and that no
 *      other group has. It is cleared with remote-valid, by a write, a TRIM or an unmapping, under
 *      the same lock. Bytes come to rest when they match the page's seal. So they are of the
 *      newest version, and never its only copy; and nothing of them is in the arena. Pages of far
 *      memory are never read ahead here: agents do that, and their reads overtake their writes.
 *  R15 A read ahead on its way holds a use of its place (R5). At rest it is no use, no entry and no
 *      activity. A request that joins has one of its pending there, which is taken once: by the
 *      read's end, or when that is slow. What it did not get by then is read in another way.
 *  R16 Which of two sources is the quicker (state/speed.h) decides only where a page may be read
 *      from either: it is remote-valid on a mapped place, backup-current and not staged, and none
 *      of the two has failed this request. A measurement ends with its read, whatever became of
 *      that. Such a read of the backup has a donor's leg, which holds a use of the place (R5) until
 *      it has ended or the backup's ended before it was sent.
 *
 * Rules of the arena. They hold after every single store to it, with or without locks, because the
 * process may be killed there and its successor (recover.c) has nothing else to go by:
 *  R9  A descriptor is committed by the store of its page, after its bytes, version and seal.
 *      A page's newest committed descriptor says where it is; without one, its bits do. So
 *      a version is committed before older ones are cleared, then the bits change, then the page's
 *      seal; and the store that makes a version safe elsewhere (R1) comes before its descriptor
 *      is cleared. Without a descriptor, one store may take a seal away from a page whose bytes do
 *      not open (anew.c).
 *  R10 Only a page's newest version has a descriptor, except for the moment after a newer one was
 *      committed. A superseded or zeroed version loses its descriptor even while transfers hold its
 *      buffer: otherwise it would come back when the newer one is freed. Buffers of copies have
 *      none.
 *  R11 The bit that says where a page is valid is set before the one that said where it was, or
 *      that it was lost, is cleared; at_place is stored before remote-valid is set.
 *  R12 A place's word is stored after everything else of its mapping and before the place becomes
 *      current; it says UNMAPPED only after the last bit that names the place was cleared.
 *  R13 Arena and backup have one owner, who holds a lock on each that ends with its last thread and
 *      its last write. A successor checks everything first and changes nothing if it refuses; after
 *      that, each of its own stores keeps these rules too.
 *
 *  R17 A nonce is taken by raising the count in the arena, before it is used. The salt of its epoch
 *      is stored before the epoch counts as used, and that before the count names it. Pages leave
 *      the memory of requests and of reads ahead only sealed: staging buffers, pairs and transfers
 *      hold what the cipher made of them. Bytes that do not open are in no request that ends well.
 *
 * Locks, outermost first (never two of one kind):
 *   isw_engine.control    remotes and slab mapping, control thread only, may block
 *   iswi_shard.lock       entries, versions, page bits and seals of the shard's pages
 *   iswi_backup.lock      backup queue, flush state
 *   staging.lock, ops_lock, entries_lock, waiting.lock, ahead.lock   leaves
 * No lock is held while a transport's submit or a request's done runs.
 */
#ifndef ISWI_STATE_ENGINE_H
#define ISWI_STATE_ENGINE_H

#include "engine/request.h"
#include "engine/state/pace.h"
#include "transport/transport.h"
#include "util/util.h"

#define ISWI_NONE UINT32_MAX

/* Reads that are both legs' at once: with buffers for each, their pages, and without any. */
#define ISWI_PAIRS      16u
#define ISWI_PAIRS_ALL  ((1u << ISWI_PAIRS) - 1) /* their bits */
#define ISWI_PAIR_PAGES 16u
#define ISWI_PAIR_BYTES (2 * ISWI_PAIR_PAGES * ISW_PAGE_BYTES)
#define ISWI_BARE       1024u
/* For each lock of a predecessor who was killed: its last writes may be on a slow disk. */
#define ISWI_OWNER_WAIT_MS 10000u

struct iswi_backup;       /* backup/backup.h */
struct iswi_remote;       /* remote/remote.h */
struct iswi_rdma_domains; /* transport/rdma.h */
struct iswi_ahead;        /* state/ahead.h */
struct iswi_seal_ops;     /* seal/seal.h */
struct iswi_sealer;
struct iswi_kept_seal; /* state/arena.h */

/* What isw_engine_stats copies, by its names. Relaxed: they order nothing. */
/* clang-format off */
#define ISWI_COUNTERS(each) \
	each(read_requests) each(write_requests) each(trim_requests) each(zero_requests) \
	each(flush_requests) each(requests_failed) each(pages_in) each(pages_in_remote) \
	each(pages_in_staging) each(pages_in_backup) each(pages_in_zero) each(pages_out) \
	each(pages_out_remote) each(pages_out_backup) each(pages_out_superseded) \
	each(backup_write_requests) each(fallback_unmapped) each(fallback_suspended) \
	each(fallback_invalid) each(fallback_error) each(remote_errors) \
	each(crc_errors_remote) each(crc_errors_backup) each(backup_errors) \
	each(staging_waits) each(pages_copied) each(pages_migrated) \
	each(pages_copy_dropped) each(fallback_slow) each(fallback_quicker) \
	each(fallback_measured) each(hedged_reads) each(hedged_wins) \
	each(pages_ahead) each(pages_ahead_used) each(pages_ahead_wasted)
/* clang-format on */

struct iswi_counters {
#define ISWI_COUNTER(name) atomic_uint_fast64_t name;
	ISWI_COUNTERS(ISWI_COUNTER)
#undef ISWI_COUNTER
	/* Of them those of block devices, which alone requests_max bounds. */
	atomic_uint_fast64_t in_flight, block_in_flight, copies_begun;
};

/* Writes without a staging buffer; see ops/write.c. */
struct iswi_waiting {
	pthread_mutex_t lock;
	struct iswi_req *head, **tail;
	bool busy, again;
};

struct isw_engine {
	struct isw_engine_config config;
	const struct iswi_clock *clock;
	uint64_t pages, slab_pages;
	uint32_t slabs_count;
	bool has_backup;
	atomic_bool report_use; /* whoever clears it reports. Pair: tell_of_use() in submit.c */

	const struct iswi_seal_ops *seal_ops;
	struct iswi_sealer *sealer; /* NULL: pages are not sealed */
	void *key_held;             /* see iswi_seal_key_hold */

	struct iswi_arena_header *arena;
	uint64_t arena_bytes;
	int state_lock_fd; /* its flock says whose the state file is; -1 without one */
	bool standby;      /* the arena is another process's: it is not even looked at */
	bool stranded;     /* staged pages may wait for their slab to be mapped; see ops/write.c */
	struct iswi_slab *slabs;
	atomic_uint *remote_valid, *backup_current; /* one word a group; shard lock */
	atomic_uint *at_place;                      /* of a remote-valid page: at which one it is */
	/* Of the newest version; shard lock. One of the two, as the device seals or not. */
	atomic_uint *crc;
	struct iswi_kept_seal *seals;
	struct iswi_record *records; /* one a remote; control lock */
	struct iswi_descriptor *slots;
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
		uint32_t copies; /* of those used, by copies */
		uint32_t far;    /* of those used, by writes of far memory */
	} staging_alloc;

	struct iswi_waiting waiting, waiting_far;
	/* Staging buffers became free, or the backup began to fail. Under no lock. */
	void (*go_on)(struct isw_engine *e);

	struct iswi_pace pace;       /* whether the quicker source is asked while much is read */
	struct iswi_ahead *ahead;    /* NULL: nothing is read ahead */
	unsigned char *pairs_data;   /* buffers for both legs of reads; see ops/hedge.c */
	atomic_uint pairs_free;      /* a bit for each */
	atomic_uint bare_free;       /* hedges without a pair that may begin */
	unsigned char *readers_data; /* leg_bytes for each reader of the backup */
	uint64_t leg_bytes;
	struct iswi_op *ops, *ops_free;
	pthread_mutex_t ops_lock;
	void *volatile_memory;
	size_t volatile_bytes;

	struct iswi_backup *backup;
	pthread_mutex_t control;
	struct iswi_remote *remotes;
	struct iswi_rdma_domains *rdma;
	uint64_t mappings;         /* numbers places' words; control lock */
	atomic_uint_fast64_t pull; /* slab that is pulled, next group of it below: see ops/copy.c */
	struct iswi_events events;
	struct iswi_counters count;
	struct iswi_latency read_latency, waited_read_latency, write_latency, remote_read_latency,
		remote_write_latency, backup_read_latency, backup_write_latency;
};

/* Pages from here on are of far memory: what its agents read ahead and in which order is theirs. */
static inline uint64_t iswi_far_page(const struct isw_engine *e)
{
	return (e->config.size_bytes - e->config.far_bytes) / ISW_PAGE_BYTES;
}

static inline bool iswi_hedges(const struct isw_engine *e)
{
	return e->has_backup && e->config.hedge_us_min;
}

#endif
