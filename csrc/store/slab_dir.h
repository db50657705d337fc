/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The directory that keeps slabs over a restart of the daemon: a tmpfs, one file per slab. What a
 * slab is stands in its file's name and nowhere else, so a rename is the one step by which it
 * becomes something else:
 *
 *   slab.SERIAL.new                         being made                   removed when found
 *   slab.SERIAL.free                        zeroed, never lent since
 *   slab.SERIAL.mapped.LEASE.SLOT.GEN.TAG   lent
 *   slab.SERIAL.dirty                       not lent, not zeroed
 *   next.NUMBER                             no serial, lease or generation above it was ever used
 *
 * The rename to "mapped" comes before anybody can reach the memory. The rename to "dirty" comes
 * after the last owner lost the memory and before the next gets it. Zeroing lies between "dirty"
 * and "free".
 */
#ifndef ISWI_SLAB_DIR_H
#define ISWI_SLAB_DIR_H

#include "util/util.h"

/* Numbers that one rename of the counter gives out. */
#define ISWI_NUMBERS_RESERVED 1024u

struct iswi_slab_dir {
	int fd;            /* -1: none, slabs are anonymous memory */
	uint64_t reserved; /* see next.NUMBER */
};

enum iswi_slab_kind {
	ISWI_SLAB_FILE_NEW,
	ISWI_SLAB_FILE_FREE,
	ISWI_SLAB_FILE_DIRTY,
	ISWI_SLAB_FILE_MAPPED,
};

struct iswi_slab_name {
	uint64_t serial; /* 0: the slab has no file */
	enum iswi_slab_kind kind;
	/* Of a mapped one. */
	uint64_t lease;
	uint64_t generation;
	uint32_t slot;
	uint32_t tag;
};

/* Takes the directory for as long as it is open: -EBUSY while another process has it. */
int iswi_slab_dir_open(struct iswi_slab_dir *dir, const char *path, struct isw_error *error);
void iswi_slab_dir_close(struct iswi_slab_dir *dir);
/* Raises dir->reserved. */
int iswi_slab_dir_reserve(struct iswi_slab_dir *dir);
/* The first counter of an empty directory. */
int iswi_slab_dir_begin(struct iswi_slab_dir *dir);

bool iswi_slab_name_parse(const char *text, struct iswi_slab_name *name_out);
bool iswi_counter_parse(const char *text, uint64_t *number_out);

/* An empty file of that name; *fd_out is the caller's. */
int iswi_slab_dir_make(const struct iswi_slab_dir *dir, const struct iswi_slab_name *name,
		       uint64_t bytes, int *fd_out);
/* The commit. On success *name is what it has become. Without a file nothing is done. */
int iswi_slab_dir_rename(const struct iswi_slab_dir *dir, struct iswi_slab_name *name,
			 const struct iswi_slab_name *to);
/* Likewise, for a kind without further fields. */
int iswi_slab_dir_become(const struct iswi_slab_dir *dir, struct iswi_slab_name *name,
			 enum iswi_slab_kind kind);
/* Removes its file, if it has one. The memory lives as long as it is mapped. */
int iswi_slab_dir_unlink(const struct iswi_slab_dir *dir, struct iswi_slab_name *name);

#endif
