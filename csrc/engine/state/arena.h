/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must survive the process, in one mapping that the state file backs, and the only ways to
 * store there: R9 to R12 of engine.h are about the order of these stores.
 */
#ifndef ISWI_STATE_ARENA_H
#define ISWI_STATE_ARENA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "isw.h"

/*
 * What a test build (ISW_CRASH_POINTS) gets told after every store to the arena that a successor
 * may look at; defined by the test program, which may end the process there.
 */
#ifdef ISW_CRASH_POINTS
void iswi_crash_point(void);
/* ... and of every nonce before it is used with the key of that salt. */
void iswi_nonce_point(const unsigned char *salt, uint64_t nonce);
#else
static inline void iswi_crash_point(void)
{
}
static inline void iswi_nonce_point(const unsigned char *salt, uint64_t nonce)
{
	(void)salt;
	(void)nonce;
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

/* Keys that seal pages, each for a while (state/seal.h); a page's nonce has the number of its. */
#define ISWI_EPOCHS      64u
#define ISWI_EPOCH_SHIFT 56u
#define ISWI_EPOCH_COUNT ((1ull << ISWI_EPOCH_SHIFT) - 1)
#define ISWI_SALT_BYTES  12u

struct iswi_epoch {
	unsigned char salt[ISWI_SALT_BYTES];
	atomic_uint used; /* stored after the salt */
};

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
	uint32_t staging_pages, remotes_max, no_backup, sealed;
	uint64_t slabs_offset, remote_valid_offset, at_place_offset, backup_current_offset;
	uint64_t seals_offset, records_offset;
	uint64_t slots_offset, staging_offset;

	atomic_uint phase;
	/* Of a device that seals. */
	/* Raised by whoever seals (acquire), replaced by the control thread once a key is there. */
	atomic_uint_fast64_t next_nonce;
	struct iswi_epoch epochs[ISWI_EPOCHS];
};

/* Whose lease a remote is, in Python's words: the newer of the two copies that are whole counts. */
struct iswi_record {
	struct iswi_record_copy {
		atomic_uint sequence; /* 0: being written; stored last */
		uint32_t length;      /* 0: there is none */
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
 * One slab: where it is and, while it migrates, where it was. While it does not migrate, the place
 * that is not current is UNMAPPED.
 */
struct iswi_slab {
	struct iswi_place places[2];
	atomic_uint current;                                          /* where writes go; seq_cst */
	atomic_uint_fast64_t page_ins, page_outs, remote_valid_pages; /* relaxed statistics */
};

#define ISWI_NO_PAGE UINT64_MAX

/* What tells a version of a page from all others: see state/seal.h. */
struct iswi_seal {
	uint64_t number; /* its nonce, or its checksum */
	uint64_t tag[2];
};
/* The same in the page table, under the page's shard lock. */
struct iswi_kept_seal {
	atomic_uint_fast64_t number, tag[2];
};

/* Descriptor of one staging buffer. A successor believes it only while it names a page. */
struct iswi_descriptor {
	atomic_uint_fast64_t page; /* or ISWI_NO_PAGE; stored last, which commits it (R9) */
	uint32_t version;
	struct iswi_seal seal;
};

/* Versions count up and around; those of a page that meet are never far apart. */
static inline bool iswi_is_newer(uint32_t version, uint32_t than)
{
	return (int32_t)(version - than) > 0;
}
/* No written version is 0: see iswi_entry. */
static inline uint32_t iswi_version_after(uint32_t version)
{
	return version + 1 ? version + 1 : 1;
}

/* ---------------------------------------------------------------------- functions */

/* Room for so many bytes at *end, which moves to a page's border; returns where it begins. */
uint64_t iswi_lay_out(uint64_t *end, uint64_t bytes);
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

/* Under the control lock, or before anybody else knows the engine. */
uint32_t iswi_record_read(const struct isw_engine *e, uint32_t remote, void *data_out);
void iswi_record_write(struct isw_engine *e, uint32_t remote, const void *data, uint32_t length);

#endif
