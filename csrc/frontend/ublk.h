/* SPDX-License-Identifier: Apache-2.0 */
/* The ublk front end: ublk.c, or ublk_none.c in a build without it. */
#ifndef ISWI_UBLK_H
#define ISWI_UBLK_H

#include "frontend/frontend.h"

extern const struct iswi_frontend_ops iswi_ublk_ops;

#endif
