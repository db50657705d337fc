/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ISW_ENGINE_BACKUP_OPEN_H
#define ISW_ENGINE_BACKUP_OPEN_H

#include <stdbool.h>
#include <sys/stat.h>

struct isw_error;

/*
 * Opens a file, made where there is none, or a disk; the descriptor, or -errno. predecessors: it
 * must be there. st_out: of what is open. is_new_out: made by this call.
 */
int iswi_backup_open(const char *path, bool predecessors, struct stat *st_out, bool *is_new_out,
		     struct isw_error *error);

#endif
